"""Anthropic's and OpenAI's newer API on the whole chain: the official clients, the real model, real kills."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import psutil
import pytest
from harness import Server, request, running_server, wait_until

from tests.e2e.kit import client_of, wait_until_idle

MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of France?"
USER: list[Any] = [{"role": "user", "content": QUESTION}]
STORY: list[Any] = [{"role": "user", "content": "Tell me a long story about a fisherman."}]
PARIS = "The capital of France is Paris."
SIM = ("--backend", "sim", "--sim-step-ms", "5", "--sim-max-model-len", "50000", "--sim-num-blocks", "20000")


def anthropic_of(server: Server) -> Any:
    """The official client, without its retries."""
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)


def greedy(**fields: Any) -> dict[str, Any]:
    """Fields of /v1/messages for an answer that is the same each time."""
    return {"model": MODEL, "max_tokens": 100, "messages": USER, "extra_body": {"temperature": 0}, **fields}


def test_all_three_apis_say_the_same(exact: Server) -> None:
    chat = client_of(exact).chat.completions.create(model=MODEL, messages=STORY, temperature=0, max_tokens=40)
    message = anthropic_of(exact).messages.create(**greedy(messages=STORY, max_tokens=40))
    response = client_of(exact).responses.create(model=MODEL, input=STORY, temperature=0, max_output_tokens=40)
    assert chat.usage is not None and response.usage is not None
    text = chat.choices[0].message.content
    assert text and text == message.content[0].text == response.output_text
    assert (message.stop_reason, response.status) == ("max_tokens", "incomplete")
    cached = message.usage.cache_read_input_tokens or 0
    assert chat.usage.prompt_tokens == message.usage.input_tokens + cached == response.usage.input_tokens
    assert chat.usage.completion_tokens == message.usage.output_tokens == response.usage.output_tokens == 40


def test_the_capital_of_france_by_every_way_of_both_clients(exact: Server) -> None:
    messages, responses = anthropic_of(exact).messages, client_of(exact).responses
    asked: dict[str, Any] = {"model": MODEL, "input": QUESTION, "temperature": 0}
    with messages.stream(**greedy()) as stream:
        texts = ["".join(stream.text_stream)]
    with responses.stream(**asked) as events:
        texts.append(events.get_final_response().output_text)
    texts.append(messages.create(**greedy()).content[0].text)
    texts.append(responses.create(**asked).output_text)

    async def others() -> list[str]:
        async with (
            anthropic.AsyncAnthropic(base_url=exact.url, api_key="none", max_retries=0) as one,
            openai.AsyncOpenAI(base_url=f"{exact.url}/v1", api_key="none", max_retries=0) as two,
        ):

            async def streamed_message() -> str:
                async with one.messages.stream(**greedy()) as stream:
                    return "".join([text async for text in stream.text_stream])

            async def streamed_response() -> str:
                stream = await two.responses.create(**asked, stream=True)
                return "".join([e.delta async for e in stream if e.type == "response.output_text.delta"])

            return list(await asyncio.gather(streamed_message(), streamed_response()))

    assert texts + asyncio.run(others()) == [PARIS] * 6
    wait_until_idle(exact)


def test_a_forced_call_and_a_form_are_kept_by_the_model(exact: Server) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Graz", "Linz"]}}, "required": ["city"]}
    message = anthropic_of(exact).messages.create(
        **greedy(
            tools=[{"name": "weather", "input_schema": schema}],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )
    )
    assert message.stop_reason == "tool_use"
    assert (message.content[-1].name, message.content[-1].input["city"]) in {("weather", "Graz"), ("weather", "Linz")}
    form: Any = {"format": {"type": "json_schema", "name": "place", "schema": schema, "strict": True}}
    response = client_of(exact).responses.create(model=MODEL, input=QUESTION, temperature=0, text=form)
    assert json.loads(response.output_text)["city"] in ("Graz", "Linz")


@pytest.mark.parametrize("api", ["messages", "responses"])
def test_a_killed_scheduler_changes_no_text(exact: Server, api: str) -> None:
    if api == "messages":
        whole = anthropic_of(exact).messages.create(**greedy(messages=STORY)).content[0].text
        stream: Any = anthropic_of(exact).messages.create(**greedy(messages=STORY), stream=True)
    else:
        asked: dict[str, Any] = {"model": MODEL, "input": STORY, "temperature": 0, "max_output_tokens": 100}
        whole = client_of(exact).responses.create(**asked).output_text
        stream = client_of(exact).responses.create(**asked, stream=True)
    text, kinds = "", []
    for event in stream:
        kinds.append(event.type)
        if event.type in ("content_block_delta", "response.output_text.delta"):
            text += event.delta if api == "responses" else event.delta.text
            if sum("delta" in kind for kind in kinds) == 3:
                exact.children()["scheduler"].send_signal(signal.SIGKILL)
    assert kinds[-1] in ("message_stop", "response.incomplete")
    assert text == whole


def test_a_conversation_is_continued_from_a_background_response(exact: Server) -> None:
    responses = client_of(exact).responses
    first = responses.create(model=MODEL, input=QUESTION, temperature=0, background=True)
    wait_until(lambda: responses.retrieve(first.id).status == "completed", 60, "the answer")
    assert responses.retrieve(first.id).output_text == PARIS
    second = responses.create(
        model=MODEL, input="And of Italy?", previous_response_id=first.id, temperature=0, max_output_tokens=40
    )
    assert "Rome" in second.output_text


@pytest.fixture(scope="module")
def three() -> Iterator[Server]:
    """Three API processes behind one port; each keeps its own responses."""
    with running_server(*SIM, "--api-processes", "3") as server:
        yield server


def created(server: Server, count: int, **fields: Any) -> dict[int, str]:
    """Responses by the number of the process that keeps them; from all three processes."""

    def one(_: int) -> str:
        body = {"input": "x", "max_output_tokens": 4, "ignore_eos": True, **fields}
        return str(request(server.port, "POST", "/v1/responses", body).json()["id"])

    found: dict[int, str] = {}

    def all_found() -> bool:
        with ThreadPoolExecutor(8) as pool:
            found.update({int(id[5:7], 16): id for id in pool.map(one, range(count))})
        return len(found) == 3

    wait_until(all_found, 60, "a response from each process")
    return found


def test_a_response_is_found_whichever_process_is_asked(three: Server) -> None:
    for id in created(three, 12).values():
        for _ in range(12):  # connections go to any of them
            answer = request(three.port, "GET", f"/v1/responses/{id}")
            assert (answer.status, answer.json()["status"]) == (200, "incomplete")
        items = request(three.port, "GET", f"/v1/responses/{id}/input_items").json()
        assert [item["role"] for item in items["data"]] == ["user"]
        body = {"input": "y", "previous_response_id": id, "max_output_tokens": 4}
        assert request(three.port, "POST", "/v1/responses", body).json()["previous_response_id"] == id


def test_a_response_is_cancelled_and_deleted_whichever_process_is_asked(three: Server) -> None:
    running = created(three, 12, background=True, max_output_tokens=20_000)
    for id in running.values():
        assert request(three.port, "POST", f"/v1/responses/{id}/cancel").json()["status"] == "cancelled"
        assert request(three.port, "GET", f"/v1/responses/{id}").json()["status"] == "cancelled"
        assert request(three.port, "DELETE", f"/v1/responses/{id}").json()["deleted"]
        answer = request(three.port, "GET", f"/v1/responses/{id}")
        assert (answer.status, answer.json()["error"]["code"]) == (404, "response_not_found")


def test_what_a_process_kept_is_gone_with_it_and_says_so(three: Server) -> None:
    number, id = next(iter(created(three, 12).items()))
    assert request(three.port, "GET", f"/v1/responses/{id}").status == 200
    victim = next(
        child
        for child in psutil.Process(three.pid).children()
        if child.environ().get("TRIPTYCH_PROCESS_NUMBER") == str(number)
    )
    victim.send_signal(signal.SIGKILL)
    victim.wait(60)

    def gone() -> bool:
        try:
            answer = request(three.port, "GET", f"/v1/responses/{id}")
        except OSError:
            return False  # the connection was the dead process's
        # 503 while its successor starts, then it is known that nobody has it.
        assert answer.status in (404, 503), answer.body
        return bool(answer.status == 404)

    wait_until(gone, 60, "an honest 404")

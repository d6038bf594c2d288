"""Answers with a form on the real model through the official client: they keep it, alone, together, cut and killed."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema
import openai
import pytest
from harness import Server, running_server, wait_until
from pydantic import BaseModel

from tests.e2e.kit import client_of, samples_of, wait_until_idle

MODEL = "smollm2-135m-instruct"
ASK: list[Any] = [{"role": "user", "content": "Invent a person. Answer in JSON."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}
AS_SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
EBNF = 'root ::= "(" item ("," item)* ")"\nitem ::= [a-z] [a-z] [a-z]'
LARK = 'start: "<" WORD " " WORD ">"\nWORD: /[a-z]{2,8}/'

Judge = Callable[[str], Any]


def keeps_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def like(pattern: str) -> Judge:
    return lambda text: re.fullmatch(pattern, text)


FORMS: dict[str, tuple[dict[str, Any], Judge]] = {
    "schema": ({"response_format": AS_SCHEMA}, keeps_schema),
    "object": (
        {"structured_outputs": {"json_object": True}, "stop": None, "max_tokens": 40},
        lambda text: text.startswith("{"),
    ),
    "regex": ({"regex": "[A-Z][a-z]{1,9} [0-9]{2}"}, like("[A-Z][a-z]{1,9} [0-9]{2}")),
    "choice": ({"guided_choice": ["red", "green", "blue", "red-green"]}, like("red|green|blue|red-green")),
    "ebnf": ({"ebnf": EBNF, "max_tokens": 40}, lambda text: re.match(r"\([a-z]{3}(,[a-z]{3})*", text)),
    "lark": ({"guided_grammar": LARK}, like("<[a-z]{2,8} [a-z]{2,8}>")),
    "number": ({"guided_json": {"type": "integer", "minimum": 10, "maximum": 99}}, like("[1-9][0-9]")),
    "vllm": ({"structured_outputs": {"regex": r"\d{4}-\d{2}"}}, like(r"\d{4}-\d{2}")),
}


def chat(server: Server, stream: bool = False, **fields: Any) -> Any:
    known = {"response_format", "stop", "n", "logprobs", "top_logprobs", "max_tokens", "temperature", "seed"}
    params = {"temperature": 0, "max_tokens": 120} | {name: fields[name] for name in fields if name in known}
    extra = {name: value for name, value in fields.items() if name not in known}
    return client_of(server).chat.completions.create(
        model=MODEL, messages=ASK, stream=stream, extra_body=extra, **params
    )


def streamed(server: Server, **fields: Any) -> tuple[str, str]:
    """The joined text of a stream, and its finish reason."""
    text, reason = "", ""
    for chunk in chat(server, stream=True, **fields):
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
    return text, reason


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_keeps_its_form_streamed_and_whole(served: Server, form: str) -> None:
    fields, keeps = FORMS[form]
    whole = chat(served, **fields).choices[0]
    assert keeps(whole.message.content), whole.message.content
    assert streamed(served, **fields) == (whole.message.content, whole.finish_reason)
    if form not in ("object", "ebnf"):  # those two may go on for ever
        assert whole.finish_reason == "stop"


class Person(BaseModel):
    name: str
    age: int
    size: Literal["small", "large"]


def test_the_client_parses_an_answer_into_a_model_of_its_own(served: Server) -> None:
    answer = client_of(served).chat.completions.parse(
        model=MODEL, messages=ASK, temperature=0, max_tokens=100, response_format=Person
    )
    person = answer.choices[0].message.parsed
    assert isinstance(person, Person) and person.size in ("small", "large")


def test_completions_take_a_form_too_and_echo_only_the_prompt_before_it(served: Server) -> None:
    prompts = ["Red or blue? ", "Blue or red? "]
    form = {"guided_choice": ["red", "blue"]}
    answer = client_of(served).completions.create(
        model=MODEL, prompt=prompts, temperature=0, echo=True, max_tokens=20, extra_body=form
    )
    for choice, prompt in zip(answer.choices, prompts, strict=True):
        assert choice.text.removeprefix(prompt) in ("red", "blue") and choice.finish_reason == "stop"


def test_random_seeds_say_nothing_but_the_schema(served: Server) -> None:
    def one(seed: int) -> str:
        text: str = chat(served, response_format=AS_SCHEMA, temperature=1.5, seed=seed).choices[0].message.content
        return text

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(one, range(8)))
    assert all(keeps_schema(text) for text in texts)
    assert len(set(texts)) > 4


def test_every_choice_keeps_the_form_and_they_differ(served: Server) -> None:
    answer = chat(served, response_format=AS_SCHEMA, n=2, temperature=1.2, seed=3)
    texts = [choice.message.content for choice in answer.choices]
    assert all(keeps_schema(text) for text in texts) and texts[0] != texts[1]


def test_log_probabilities_are_those_of_the_model_and_spell_the_answer(served: Server) -> None:
    choice = chat(served, guided_choice=["zebra", "quartz"], logprobs=True, top_logprobs=3).choices[0]
    entries = choice.logprobs.content
    text = b"".join(bytes(entry.bytes) for entry in entries if entry.token != "<|im_end|>" and entry.logprob <= 0)
    assert text.decode().startswith(choice.message.content)
    # What the model would rather have said is reported, though the form forbade it.
    assert entries[0].logprob < entries[0].top_logprobs[0].logprob
    assert entries[0].token not in [top.token for top in entries[0].top_logprobs]


def test_an_answer_that_is_cut_says_so(served: Server) -> None:
    choice = chat(served, response_format=AS_SCHEMA, max_tokens=5).choices[0]
    assert choice.finish_reason == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(choice.message.content)


def test_an_end_that_is_ignored_adds_nothing_to_the_answer(served: Server) -> None:
    answer = chat(served, guided_choice=["red", "blue"], ignore_eos=True, max_tokens=12)
    assert answer.choices[0].message.content in ("red", "blue")
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 12


def test_a_complete_answer_ends_before_min_tokens_without_another_word(served: Server) -> None:
    choice = chat(served, guided_choice=["red", "blue"], min_tokens=9, max_tokens=12).choices[0]
    assert choice.message.content in ("red", "blue") and choice.finish_reason == "stop"


def test_a_stop_string_cuts_a_form(served: Server) -> None:
    choice = chat(served, regex="ab{5}c", stop=["bbb"]).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("a", "stop")


def test_eight_forms_are_kept_together_and_a_bad_one_among_them_disturbs_nobody(served: Server) -> None:
    def bad() -> int:
        with pytest.raises(openai.BadRequestError) as refusal:
            chat(served, stream=True, regex="(a")
        return refusal.value.status_code

    with ThreadPoolExecutor(len(FORMS) + 1) as pool:
        together = {form: pool.submit(streamed, served, **fields) for form, (fields, _) in FORMS.items()}
        refused = pool.submit(bad)
        assert refused.result() == 400
        for form, (_, keeps) in FORMS.items():
            text = together[form].result()[0]
            assert keeps(text), (form, text)
    wait_until_idle(served)


# --- exact, and killed --------------------------------------------------------------------------------------------


def test_forms_say_the_same_together_in_a_pool_that_is_too_small(exact: Server) -> None:
    alone = {form: streamed(exact, **fields) for form, (fields, _) in FORMS.items()}
    before = samples_of(exact)["triptych_scheduler_preemptions_total"]
    filler = "Once upon a time, in a village by the sea, there lived an old fisherman who " * 6

    def long() -> None:
        client_of(exact).completions.create(model=MODEL, prompt=filler, temperature=0, max_tokens=160)

    with ThreadPoolExecutor(2 * len(FORMS) + 4) as pool:
        fillers = [pool.submit(long) for _ in range(4)]
        again = [(form, pool.submit(streamed, exact, **FORMS[form][0])) for form in [*FORMS, *FORMS]]
        for form, answer in again:
            assert answer.result() == alone[form], form
        for one in fillers:
            one.result()
    after = wait_until_idle(exact)
    assert after["triptych_scheduler_preemptions_total"] > before, "the pool was too large for this to say anything"


def test_a_scheduler_or_runner_that_is_killed_within_an_answer_changes_nothing_of_it() -> None:
    flags = ("--dtype", "float32", "--num-threads", "1", "--max-model-len", "640", "--num-blocks-override", "129")
    with running_server(*flags) as server:
        fields = {"response_format": AS_SCHEMA}
        whole, reason = streamed(server, **fields)
        assert keeps_schema(whole) and reason == "stop"
        for role, cut in (("scheduler", 9), ("runner", 3)):
            text, ended = "", ""
            for number, chunk in enumerate(chat(server, stream=True, **fields)):
                text += chunk.choices[0].delta.content or ""
                ended = chunk.choices[0].finish_reason or ended
                if number == cut:
                    server.children()[role].send_signal(signal.SIGKILL)
            assert (text, ended) == (whole, reason), (role, cut)
            wait_until(lambda: server.request("GET", "/ready").status == 200, 60, "the chain to be whole again")

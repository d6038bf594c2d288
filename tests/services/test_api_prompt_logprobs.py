"""Log-probabilities of prompts as clients read them: vLLM's list, OpenAI's echo, and how lm-eval reads the latter."""

from __future__ import annotations

import json
from operator import itemgetter
from threading import Thread
from typing import Any

import numpy as np
import pytest

from protocol.columns import F32, pack_i32
from protocol.messages import Outputs, PromptLogprobs, Submit
from tests.services.fake_scheduler import prompt_of, told_of
from tests.services.service_kit import ANSWER, MODEL, MakeService, Service, stream_lines, strict

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
IDS = [504, 3575, 282, 4649, 314]


def ask(service: Service, path: str = COMPLETIONS, status: int = 200, **fields: Any) -> Any:
    prompt = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": IDS}
    response = service.http.post(path, json={"model": MODEL, "max_tokens": 50, **prompt, **fields})
    assert response.status_code == status, response.text
    return strict(response.content)


def submits(service: Service) -> list[Submit]:
    assert service.scheduler is not None
    return service.scheduler.record.submits


def text_of(service: Service, token: int) -> str:
    return service.tokenizer.token_bytes(token).decode()


# --- vLLM's list ----------------------------------------------------------------------------------------------


def test_the_list_has_null_and_then_each_token_among_its_alternatives(service: Service) -> None:
    answer = ask(service, prompt_logprobs=2)
    (choice,) = answer["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None and len(rest) == len(IDS) - 1 and choice["text"] == ANSWER and choice["logprobs"] is None
    for position, (token, entry) in enumerate(zip(IDS[1:], rest, strict=True), 1):
        assert entry == {
            str(token): {"logprob": -position / 8, "rank": 3, "decoded_token": text_of(service, token)},
            "7": {"logprob": -0.125, "rank": 1, "decoded_token": text_of(service, 7)},
            "5": {"logprob": -0.25, "rank": 2, "decoded_token": text_of(service, 5)},
        }
    assert [submit.params.prompt_logprobs for submit in submits(service)] == [2]
    assert [submit.params.logprobs for submit in submits(service)] == [-1]


def test_a_prompt_token_that_is_among_the_likeliest_is_there_once(service: Service) -> None:
    (choice,) = ask(service, prompt=[504, 7, 5], prompt_logprobs=1)["choices"]
    assert [list(entry) for entry in choice["prompt_logprobs"][1:]] == [["7"], ["5", "7"]]
    assert [list(entry) for entry in ask(service, prompt_logprobs=0)["choices"][0]["prompt_logprobs"][1:]] == [
        [str(token)] for token in IDS[1:]
    ]
    assert ask(service, prompt=[504], prompt_logprobs=1)["choices"][0]["prompt_logprobs"] == [None]


def test_a_chat_has_the_list_beside_its_choices_and_computes_it_once(service: Service) -> None:
    answer = ask(service, CHAT, prompt_logprobs=1, n=3)
    assert len(answer["choices"]) == 3 and "prompt_logprobs" not in answer["choices"][0]
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"] and answer["prompt_logprobs"][0] is None
    assert [submit.params.prompt_logprobs for submit in submits(service)] == [1, -1, -1]
    assert "prompt_logprobs" not in ask(service, CHAT)
    assert "prompt_logprobs" not in ask(service)["choices"][0]


def test_several_prompts_have_their_own_lists_with_each_of_their_choices(service: Service) -> None:
    answer = ask(service, prompt=[IDS, IDS[:3]], prompt_logprobs=0, n=2)
    lists = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert [len(one) for one in lists] == [5, 5, 3, 3] and lists[0] == lists[1]
    assert [submit.params.prompt_logprobs for submit in submits(service)] == [0, -1, 0, -1]


# --- OpenAI's echo --------------------------------------------------------------------------------------------


def test_an_echo_has_the_log_probabilities_of_prompt_and_text_in_one(service: Service) -> None:
    answer = service.client.completions.create(model=MODEL, prompt=IDS, max_tokens=3, echo=True, logprobs=1)
    (choice,) = answer.choices
    made = choice.logprobs
    assert made is not None and made.tokens and made.token_logprobs and made.top_logprobs and made.text_offset
    assert "".join(made.tokens) == choice.text and choice.text.startswith(service.tokenizer.decode(IDS))
    assert made.token_logprobs == [None, -0.125, -0.25, -0.375, -0.5, -0.5, -0.5, -0.5]
    assert made.top_logprobs[0] is None
    assert made.top_logprobs[1] == {text_of(service, 7): -0.125, text_of(service, 3575): -0.125}
    assert [choice.text[begin:].startswith(token) for begin, token in zip(made.text_offset, made.tokens, strict=True)]
    ends = [begin + len(token) for begin, token in zip(made.text_offset, made.tokens, strict=True)]
    assert [*made.text_offset[1:], len(choice.text)] == ends
    assert submits(service)[0].params.prompt_logprobs == submits(service)[0].params.logprobs == 1


@pytest.mark.parametrize("prompt", ["a 漢 🙂 b", "<|im_start|>user\nx", "é"])
def test_offsets_count_characters_of_the_text_that_is_echoed(service: Service, prompt: str) -> None:
    (choice,) = ask(service, prompt=prompt, echo=True, logprobs=0, max_tokens=1)["choices"]
    made = choice["logprobs"]
    assert choice["text"].startswith(prompt)
    ids = service.tokenizer.encode(prompt)
    whole = b""
    for token, offset in zip(ids, made["text_offset"], strict=False):
        text = whole.decode("utf-8", "ignore")
        assert offset == len(text), (token, whole)
        whole += service.tokenizer.token_bytes(token)
    assert whole.decode() == prompt and made["text_offset"][-1] == len(prompt)


def test_a_special_token_that_was_added_and_is_not_in_the_text_has_no_length(service: Service) -> None:
    (choice,) = ask(service, prompt=[1, *IDS], echo=True, logprobs=0, max_tokens=1)["choices"]
    assert not choice["text"].startswith("<|im_start|>") and choice["logprobs"]["tokens"][0] == "<|im_start|>"
    assert choice["logprobs"]["text_offset"][:3] == [0, 0, len(text_of(service, IDS[0]))]


def test_a_stream_begins_with_the_echo_and_its_log_probabilities(service: Service) -> None:
    body = {"prompt": IDS, "echo": True, "logprobs": 1, "max_tokens": 3, "n": 2}
    whole = ask(service, **body)["choices"]
    chunks = [json.loads(line) for line in stream_lines(service, COMPLETIONS, body)[:-1]]
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["text"] == service.tokenizer.decode(IDS) and len(mine[0]["logprobs"]["tokens"]) == len(IDS)
        joined = {name: [one for part in mine for one in part["logprobs"][name]] for name in whole[0]["logprobs"]}
        assert joined == whole[index]["logprobs"]


def test_both_shapes_go_together_each_with_its_own_number_of_alternatives(service: Service) -> None:
    (choice,) = ask(service, echo=True, logprobs=0, prompt_logprobs=2, max_tokens=2)["choices"]
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [3] * 4
    assert [len(entry) for entry in choice["logprobs"]["top_logprobs"][1:]] == [1] * 6
    assert submits(service)[0].params.prompt_logprobs == 2 and submits(service)[0].params.logprobs == 0


# --- no output ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_0_answers_with_the_prompt_alone(service: Service, stream: bool) -> None:
    body = {"echo": True, "logprobs": 1, "max_tokens": 0}
    if stream:
        options = {"include_usage": True}
        lines = stream_lines(service, COMPLETIONS, {"prompt": IDS, "stream_options": options, **body})
        parts = [json.loads(line) for line in lines[:-1]]
        choices, usage = [part["choices"][0] for part in parts[:-1]], parts[-1]["usage"]
        assert len(choices) == 2 and choices[1]["text"] == "" and choices[1]["logprobs"]["tokens"] == []
        choices[0]["finish_reason"] = choices[1]["finish_reason"]
    else:
        answer = ask(service, **body)
        choices, usage = answer["choices"], answer["usage"]
    assert choices[0]["text"] == service.tokenizer.decode(IDS) and choices[0]["finish_reason"] == "length"
    assert choices[0]["logprobs"]["token_logprobs"] == [None, -0.125, -0.25, -0.375, -0.5]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 0, 5)
    assert [submit.params.max_tokens for submit in submits(service)] == [1], "one is computed, and nobody sees it"


def test_max_tokens_0_needs_something_to_tell(service: Service) -> None:
    assert "at least 1" in ask(service, max_tokens=0, status=400)["error"]["message"]
    assert ask(service, max_tokens=0, echo=True)["choices"][0]["text"] == service.tokenizer.decode(IDS)
    assert ask(service, max_tokens=0, prompt_logprobs=0)["choices"][0]["text"] == ""
    chat = ask(service, CHAT, max_completion_tokens=0, max_tokens=None, prompt_logprobs=0)
    assert chat["choices"][0]["message"]["content"] == "" and chat["choices"][0]["finish_reason"] == "length"
    ask(service, CHAT, max_tokens=0, status=400)


# --- refusals and losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt_logprobs": True}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": [IDS * 100] * 400, "prompt_logprobs": 20}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": [IDS * 100] * 400, "logprobs": 20, "echo": True}, "logprobs"),
    ],
    ids=["many", "few", "bool", "chat", "stream", "chat-stream", "too-long", "too-long-an-echo"],
)
def test_what_cannot_be_told_is_refused(service: Service, path: str, fields: dict[str, Any], param: str) -> None:
    assert ask(service, path, 400, **fields)["error"]["param"] == param
    assert not submits(service)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_routes_without_a_place_for_them_refuse_them(service: Service, path: str) -> None:
    body = {"model": MODEL, "prompt_logprobs": 0}
    more = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}]} if "messages" in path else {"input": "x"}
    response = service.http.post(path, json={**body, **more})
    assert response.status_code == 400 and "prompt_logprobs" in response.text


@pytest.mark.parametrize("echo", [False, True])
def test_an_answer_whose_prompt_was_not_told_is_an_error_and_never_a_guess(service: Service, echo: bool) -> None:
    assert service.scheduler is not None
    service.scheduler.tell_prompt = lambda submit: [told_of(submit, 1, 2), told_of(submit, 3, 5)]
    fields = {"echo": True, "logprobs": 1} if echo else {"prompt_logprobs": 1}
    assert ask(service, status=500, **fields)["error"]["code"] == "logprobs_lost"


def test_numbers_that_json_cannot_hold_are_the_floor(service: Service) -> None:
    assert service.scheduler is not None

    def tell(submit: Submit) -> list[PromptLogprobs]:
        odd = np.array([np.nan, -np.inf, -1e30, -1.0], F32).tobytes()
        return [PromptLogprobs(submit.id, 1, 1, odd, pack_i32([1] * 4), pack_i32([7] * 4), odd)]

    service.scheduler.tell_prompt = tell
    (choice,) = ask(service, echo=True, logprobs=1, max_tokens=1)["choices"]
    assert choice["logprobs"]["token_logprobs"][:5] == [None, -9999.0, -9999.0, -9999.0, -1.0]


def test_a_scheduler_that_comes_back_is_told_what_is_known_and_tells_the_rest(make_service: MakeService) -> None:
    service = make_service()
    first = service.scheduler
    assert first is not None
    first.held = True
    answers: list[Any] = []
    thread = Thread(target=lambda: answers.append(ask(service, prompt_logprobs=1, max_tokens=4)))
    thread.start()
    first.wait_for(lambda: bool(first.live), "the request")
    (submit,) = first.record.submits
    first.send_outputs(Outputs(1, 1, prompt_logprobs=[told_of(submit, 1, 3)]))
    first.stop()
    service.scheduler = second = service.new_scheduler(epoch=2)
    thread.join(60)
    (resumed,) = second.record.submits
    assert (resumed.prompt_logprobs_from, resumed.emitted, prompt_of(resumed)) == (3, b"", IDS)
    told = answers[0]["choices"][0]["prompt_logprobs"]
    own = [entry[str(token)]["logprob"] for token, entry in zip(IDS[1:], told[1:], strict=True)]
    assert own == [-0.125, -0.25, -0.375, -0.5]


# --- as lm-eval reads it --------------------------------------------------------------------------------------


def parse_logprobs(outputs: Any, ctxlens: list[int]) -> list[tuple[float, bool]]:
    """lm_eval.models.openai_completions.LocalCompletionsAPI.parse_logprobs, as of 0.4: (sum, is_greedy) per prompt."""
    res = []
    for out in outputs if isinstance(outputs, list) else [outputs]:
        for choice, ctxlen in zip(sorted(out["choices"], key=itemgetter("index")), ctxlens, strict=False):
            assert ctxlen > 0, "Context length must be greater than 0"
            logprobs = sum(choice["logprobs"]["token_logprobs"][ctxlen:-1])
            tokens_logprobs = choice["logprobs"]["token_logprobs"][ctxlen:-1]
            top_logprobs = choice["logprobs"]["top_logprobs"][ctxlen:-1]
            is_greedy = True
            for tok, top in zip(tokens_logprobs, top_logprobs, strict=True):
                if tok != max(top.values()):
                    is_greedy = False
                    break
            res.append((logprobs, is_greedy))
    return res


def test_lm_eval_reads_the_log_probability_of_a_continuation_and_whether_it_is_greedy(service: Service) -> None:
    body = {"prompt": [IDS, [504, 7, 5]], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    answer = ask(service, **body)
    assert parse_logprobs(answer, [2, 1]) == [(-0.25 - 0.375 - 0.5, False), (-0.125 - 0.25, False)]
    assert parse_logprobs(ask(service, **{**body, "prompt": [[504, 7]]}), [1]) == [(-0.125, True)]

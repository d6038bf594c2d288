"""POST /v1/completions, whole and streamed."""

from __future__ import annotations

import json

import pytest

from protocol.columns import pack_i32, pack_u64
from protocol.messages import Finished, Outputs, Rejected, RequestStatus
from tests.services.fake_scheduler import prompt_of
from tests.services.service_kit import ANSWER, MODEL, Service, payloads, stream_lines, strict

PATH = "/v1/completions"


def test_the_official_client_gets_the_text_and_its_usage(service: Service) -> None:
    answer = service.client.completions.create(model=MODEL, prompt="Say it", max_tokens=50)
    assert answer.choices[0].text == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(service.tokenizer.encode("Say it"))
    assert answer.usage.completion_tokens == len(service.answer) + 1  # the end token counts
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.model == MODEL


def test_a_stream_joins_to_the_whole_answer(service: Service) -> None:
    chunks = list(service.client.completions.create(model=MODEL, prompt="Say it", max_tokens=50, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_stream_and_whole_answer_report_the_same_usage(service: Service) -> None:
    assert service.scheduler is not None
    service.scheduler.cached_tokens = 1
    body = {"prompt": "Say it", "max_tokens": 50}
    whole = service.http.post(PATH, json={"model": MODEL, **body}).json()["usage"]
    lines = stream_lines(service, PATH, {**body, "stream_options": {"include_usage": True}})
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole
    assert whole["prompt_tokens_details"] == {"cached_tokens": 1}
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_usage_is_absent_from_a_stream_that_did_not_ask(service: Service) -> None:
    lines = stream_lines(service, PATH, {"prompt": "Say it"})
    assert all("usage" not in json.loads(line) for line in lines[:-1])


def test_continuous_usage_grows_with_every_chunk(service: Service) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    lines = stream_lines(service, PATH, {"prompt": "Say it", "max_tokens": 50, "stream_options": options})
    counts = [json.loads(line)["usage"]["completion_tokens"] for line in lines[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == len(service.answer) + 1
    body = {"messages": [{"role": "user", "content": "x"}], "n": 2, "stream_options": {"continuous_usage_stats": True}}
    chunks = [json.loads(line) for line in stream_lines(service, "/v1/chat/completions", body)[:-1]]
    assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks), "that with the role too"


@pytest.mark.parametrize(("max_tokens", "reason", "count"), [(3, "length", 3), (9, "stop", 8), (8, "stop", 8)])
def test_the_finish_reason_says_length_only_if_the_limit_cut_it(
    service: Service, max_tokens: int, reason: str, count: int
) -> None:
    service.answer = service.answer[:7]  # the eighth token is the end token
    for stream in (False, True):
        body = {"prompt": "x", "max_tokens": max_tokens, "stream": stream}
        if stream:
            lines = stream_lines(service, PATH, {**body, "stream_options": {"include_usage": True}})
            last, usage = json.loads(lines[-3]), json.loads(lines[-2])["usage"]
        else:
            last = service.http.post(PATH, json={"model": MODEL, **body}).json()
            usage = last["usage"]
        assert last["choices"][0]["finish_reason"] == reason
        assert usage["completion_tokens"] == count


def test_an_answer_of_only_the_end_token_is_empty_and_stops(service: Service) -> None:
    service.answer = []
    lines = stream_lines(service, PATH, {"prompt": "x"})
    assert len(lines) == 2
    choice = json.loads(lines[0])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def test_max_tokens_defaults_to_sixteen(service: Service) -> None:
    assert service.scheduler is not None
    service.http.post(PATH, json={"model": MODEL, "prompt": "x"})
    assert service.scheduler.record.submits[-1].params.max_tokens == 16


@pytest.mark.parametrize("prompt", ["Hello", ["Hello"], [1, 2, 3], [[1, 2, 3]]])
def test_every_form_of_a_prompt_reaches_the_scheduler(service: Service, prompt: object) -> None:
    assert service.scheduler is not None
    assert service.http.post(PATH, json={"model": MODEL, "prompt": prompt}).status_code == 200
    expected = service.tokenizer.encode("Hello") if "Hello" in json.dumps(prompt) else [1, 2, 3]
    assert prompt_of(service.scheduler.record.submits[-1]) == expected


def test_choices_are_numbered_by_prompt_and_then_by_n(service: Service) -> None:
    assert service.scheduler is not None
    answer = service.http.post(PATH, json={"model": MODEL, "prompt": [[1], [2]], "n": 2, "seed": 9}).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    seen = [(prompt_of(s), s.params.choice, s.params.seed) for s in service.scheduler.record.submits]
    assert seen == [([1], 0, 9), ([1], 1, 9), ([2], 0, 9), ([2], 1, 9)]
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 4 * (len(service.answer) + 1)


def test_requests_without_a_seed_get_different_ones_and_choices_share_theirs(service: Service) -> None:
    assert service.scheduler is not None
    for _ in range(2):
        service.http.post(PATH, json={"model": MODEL, "prompt": "x", "n": 2})
    seeds = [s.params.seed for s in service.scheduler.record.submits]
    assert seeds[0] == seeds[1] and seeds[2] == seeds[3] and seeds[0] != seeds[2]


def test_echo_puts_the_prompt_before_the_text(service: Service) -> None:
    body = {"prompt": "Say  it: é", "echo": True, "max_tokens": 50}
    whole = service.http.post(PATH, json={"model": MODEL, **body}).json()["choices"][0]["text"]
    assert whole == "Say  it: é" + ANSWER
    lines = stream_lines(service, PATH, body)
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == whole


def test_a_stop_string_cuts_the_text_and_ends_the_request_at_the_scheduler(service: Service) -> None:
    assert service.scheduler is not None
    service.scheduler.cached_tokens = 1
    body = {"model": MODEL, "prompt": "x", "max_tokens": 500, "ignore_eos": True, "stop": [" is Paris", "zzz"]}
    answer = service.http.post(PATH, json=body).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("The capital of France", "stop")
    assert choice["stop_reason"] == " is Paris"
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
    request_id = service.scheduler.record.submits[-1].id
    service.scheduler.wait_for(lambda: request_id in service.scheduler.record.aborted, "the abort")  # type: ignore[union-attr]


def test_a_stop_string_may_be_kept_in_the_text(service: Service) -> None:
    body = {"model": MODEL, "prompt": "x", "stop": "France", "include_stop_str_in_output": True}
    assert service.http.post(PATH, json=body).json()["choices"][0]["text"] == "The capital of France"


def test_no_part_of_a_stop_string_leaks_into_the_stream(service: Service) -> None:
    service.say("ok\n\nUser: hi")
    lines = stream_lines(service, PATH, {"prompt": "x", "stop": ["\n\nUser:"]})
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == "ok"
    service.say("ok\n\nUse it")
    lines = stream_lines(service, PATH, {"prompt": "x", "stop": ["\n\nUser:"]})
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == "ok\n\nUse it"


def test_a_stop_string_on_the_last_allowed_token_is_a_stop(service: Service) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 4, "stop": " France"}
    choice = service.http.post(PATH, json=body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("The capital of", "stop")


def test_a_stop_token_ends_the_answer_and_its_text_is_left_out(service: Service) -> None:
    token = service.answer[3]
    answer = service.http.post(PATH, json={"model": MODEL, "prompt": "x", "stop_token_ids": [token]}).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("The capital of", "stop", token)
    assert answer["usage"]["completion_tokens"] == 4


def test_a_stop_token_whose_end_event_comes_later_is_left_out_of_the_stream_too(service: Service) -> None:
    scheduler = service.scheduler
    assert scheduler is not None
    token = service.answer[3]
    scheduler.tokens_allowed = 3
    body = {"model": MODEL, "prompt": "x", "stream": True, "stop_token_ids": [token]}
    with service.http.stream("POST", PATH, json=body) as response:
        parts = response.iter_text()
        text = ""
        while " of" not in text:
            text += next(parts)
        (request_id,) = scheduler.live
        scheduler.send_outputs(Outputs(1, 50, pack_u64([request_id]), pack_i32([3]), pack_i32([token])))
        # An answer to another request proves that the token has been looked at.
        assert service.http.post("/tokenize", json={"prompt": "x"}).status_code == 200
        end = Finished(request_id, RequestStatus.STOPPED, token, 4)
        scheduler.send_outputs(Outputs(1, 51, finished=[end]))
        text += "".join(parts)
    choices = [json.loads(line)["choices"][0] for line in payloads(text)[:-1]]
    assert "".join(choice["text"] for choice in choices) == "The capital of"
    assert choices[-1]["stop_reason"] == token


def test_characters_of_several_tokens_arrive_whole(service: Service) -> None:
    text = "é漢👩‍💻🇫🇷 done"
    service.say(text)
    lines = stream_lines(service, PATH, {"prompt": "x", "max_tokens": 100, "n": 2})
    joined = {0: "", 1: ""}
    for line in lines[:-1]:
        choice = json.loads(line)["choices"][0]
        assert "�" not in choice["text"]
        joined[choice["index"]] += choice["text"]
    assert joined == {0: text, 1: text}


def test_token_ids_are_returned_when_asked_for(service: Service) -> None:
    body = {"model": MODEL, "prompt": [1, 2], "return_token_ids": True}
    choice = service.http.post(PATH, json=body).json()["choices"][0]
    assert choice["prompt_token_ids"] == [1, 2]
    assert choice["token_ids"][:-1] == service.answer
    lines = [json.loads(line)["choices"][0] for line in stream_lines(service, PATH, body)[:-1]]
    assert lines[0]["prompt_token_ids"] == [1, 2]
    assert [token for line in lines for token in line["token_ids"]] == choice["token_ids"]


def test_logprobs_have_one_entry_per_token_and_only_finite_numbers(service: Service) -> None:
    assert service.scheduler is not None
    service.scheduler.top = [(11, -0.1), (12, float("-inf"))]
    body = {"model": MODEL, "prompt": "x", "max_tokens": 50, "logprobs": 2}
    response = service.http.post(PATH, json=body)
    answer = strict(response.content)
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == answer["usage"]["completion_tokens"]
    assert logprobs["token_logprobs"] == [-0.5] * len(logprobs["tokens"])
    assert "".join(logprobs["tokens"][:-1]) == ANSWER
    assert logprobs["text_offset"][:3] == [0, 3, 11]
    # The sampled token joins the asked alternatives when it is not among them.
    assert len(logprobs["top_logprobs"][0]) == 3
    assert min(logprobs["top_logprobs"][0].values()) == -9999.0


def test_streamed_logprobs_equal_the_whole_ones_even_with_text_held_back(service: Service) -> None:
    service.say("ok\n\nUse it é漢")
    body = {"model": MODEL, "prompt": "x", "max_tokens": 50, "logprobs": 1, "stop": ["\n\nUser:"]}
    whole = service.http.post(PATH, json=body).json()["choices"][0]["logprobs"]
    parts = [json.loads(line)["choices"][0]["logprobs"] for line in stream_lines(service, PATH, body)[:-1]]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [value for part in parts for value in part[name]] == whole[name]


def test_logprobs_of_zero_alternatives_report_the_sampled_token(service: Service) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2, "logprobs": 0}
    logprobs = service.http.post(PATH, json=body).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"The": -0.5}, {" capital": -0.5}]


def test_a_rejection_by_the_scheduler_is_a_status_with_and_without_streaming(service: Service) -> None:
    assert service.scheduler is not None
    service.scheduler.refuse = lambda s: Rejected(s.id, "queue_full", "the queue is full", 503, 7)
    for stream in (False, True):
        response = service.http.post(PATH, json={"model": MODEL, "prompt": "x", "stream": stream})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "7"
        assert response.json()["error"]["code"] == "queue_full"


def test_one_rejected_choice_refuses_the_request_and_aborts_the_others(service: Service) -> None:
    scheduler = service.scheduler
    assert scheduler is not None
    scheduler.held = True
    scheduler.refuse = lambda s: Rejected(s.id, "no", "no", 400) if s.params.choice == 2 else None
    response = service.http.post(PATH, json={"model": MODEL, "prompt": "x", "n": 3, "stream": True})
    assert response.status_code == 400
    ids = {s.id for s in scheduler.record.submits if s.params.choice != 2}
    scheduler.wait_for(lambda: ids <= set(scheduler.record.aborted), "the abort of the other choices")


def test_what_a_request_sets_reaches_the_scheduler(service: Service) -> None:
    assert service.scheduler is not None
    body = {
        "model": MODEL, "prompt": "x", "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": -5,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2, "min_tokens": 2,
        "ignore_eos": True, "logit_bias": {"10": -100}, "allowed_token_ids": [10, 11], "priority": 3,
        "cache_salt": "pepper", "user": "u1", "stop_token_ids": [9], "max_tokens": 4,
    }  # fmt: skip
    assert service.http.post(PATH, json=body, headers={"X-Request-Id": "mine-1"}).status_code == 200
    submit = service.scheduler.record.submits[-1]
    params = submit.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.7, 0.9, 40, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -0.5, 1.2)
    assert (params.min_tokens, params.max_tokens, params.ignore_eos) == (2, 4, True)
    assert params.seed == 2**64 - 5
    assert params.logit_bias == ((10, -100.0),)
    assert (params.allowed_token_ids, params.stop_token_ids) == ((10, 11), (9,))
    assert (submit.priority, submit.cache_salt, submit.tenant, submit.label) == (3, "pepper", "u1", "mine-1")
    assert params.eos_token_ids == service.tokenizer.eos_token_ids


def test_a_long_prompt_may_be_truncated_to_its_end(service: Service) -> None:
    assert service.scheduler is not None
    body = {"model": MODEL, "prompt": list(range(3000)), "truncate_prompt_tokens": 5}
    assert service.http.post(PATH, json=body).status_code == 200
    assert prompt_of(service.scheduler.record.submits[-1]) == [2995, 2996, 2997, 2998, 2999]

"""POST /tokenize and /detokenize agree with what generation sees."""

from __future__ import annotations

from tests.services.fake_scheduler import prompt_of
from tests.services.service_kit import MODEL, Service

USER = [{"role": "user", "content": "Hi 漢"}]


def test_text_becomes_the_ids_that_a_completion_would_use(service: Service) -> None:
    assert service.scheduler is not None
    answer = service.http.post("/tokenize", json={"model": MODEL, "prompt": "Hi 漢", "return_token_strs": True}).json()
    service.http.post("/v1/completions", json={"model": MODEL, "prompt": "Hi 漢"})
    assert answer["tokens"] == prompt_of(service.scheduler.record.submits[-1])
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 2048


def test_messages_become_the_ids_that_a_chat_would_use(service: Service) -> None:
    assert service.scheduler is not None
    answer = service.http.post("/tokenize", json={"model": MODEL, "messages": USER}).json()
    service.http.post("/v1/chat/completions", json={"model": MODEL, "messages": USER})
    assert answer["tokens"] == prompt_of(service.scheduler.record.submits[-1])


def test_ids_become_text_again(service: Service) -> None:
    ids = service.http.post("/tokenize", json={"prompt": "naïve 👍 text"}).json()["tokens"]
    assert service.http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "naïve 👍 text"}


def test_what_they_cannot_do_is_a_400(service: Service) -> None:
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": USER}),
        ("/tokenize", {"messages": []}),
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [49152]}),
        ("/detokenize", {"tokens": ["a"]}),
    ):
        assert service.http.post(path, json=body).status_code == 400, (path, body)
    assert service.http.post("/tokenize", json={"model": "nope", "prompt": "x"}).status_code == 404

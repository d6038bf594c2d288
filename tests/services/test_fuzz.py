"""Whatever JSON a client sends, the answer is a result or an error with a reason; never a 500, never a hang."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from harness import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services import schema
from services.anthropic.schema import MessagesRequest
from services.responses.schema import ResponsesRequest
from tests.services.service_kit import MODEL, Service, payloads

FIELDS = sorted(
    {*schema.CompletionRequest.__struct_fields__, *schema.ChatRequest.__struct_fields__}
    | set(schema.UNSUPPORTED)
    | schema.IGNORED
)
OTHER_FIELDS = sorted({*MessagesRequest.__struct_fields__, *ResponsesRequest.__struct_fields__})
KEYS = st.text(max_size=4) | st.sampled_from(["role", "content", "type", "text", "1"])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.floats(0, 1)
    | st.text(max_size=8)
    | st.sampled_from(["user", "text", MODEL, "0", "49152", "\U0001f44d", "\ud83d"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=4) | st.sampled_from(["role", "content", "type", "text", "1"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
ALMOST_JSON = st.text(alphabet='{}[]":,0123456789eE+-.truefalsn\\ud8', max_size=40).map(str.encode)
DEEPER = st.recursive(
    VALUES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.fixed_dictionaries(
            {
                "type": st.sampled_from(
                    ["message", "text", "tool_use", "tool_result", "function_call", "reasoning", "x"]
                )
            },
            optional={
                "role": st.sampled_from(["user", "assistant", "system"]),
                "content": inner,
                "text": inner,
                "name": inner,
                "id": inner,
                "call_id": st.text(max_size=2),
                "arguments": st.text(max_size=3),
                "output": inner,
            },
        )
    ),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4)


@settings(
    max_examples=examples(80),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(path=st.sampled_from(["completions", "chat/completions"]), fields=BODIES)
def test_any_fields_get_an_answer(service: Service, path: str, fields: dict[str, Any]) -> None:
    base: dict[str, Any] = (
        {"prompt": "x"} if path == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    )
    # Without a limit a valid request would only take long.
    body = {**base, **fields, "max_tokens": 2, "max_completion_tokens": None, "model": MODEL}
    headers = {"Content-Type": "application/json"}
    response = service.http.post(f"/v1/{path}", content=json.dumps(body), headers=headers)
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert payloads(response.text)[-1] == "[DONE]"
    else:
        assert response.json()["usage"]["completion_tokens"] >= 1
    assert service.state.engine.num_live() == 0


@settings(
    max_examples=examples(80),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    path=st.sampled_from(["messages", "responses"]),
    fields=st.dictionaries(st.sampled_from(OTHER_FIELDS), VALUES | DEEPER, max_size=4),
)
def test_any_fields_of_the_other_apis_get_an_answer(service: Service, path: str, fields: dict[str, Any]) -> None:
    limits: dict[str, Any] = {"max_tokens": 2} if path == "messages" else {"max_tokens": None, "max_output_tokens": 2}
    base: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if path == "messages" else {"input": "x"}
    body = {**base, **fields, **limits, "background": None, "model": MODEL}
    headers = {"Content-Type": "application/json"}
    response = service.http.post(f"/v1/{path}", content=json.dumps(body), headers=headers)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"]
        assert response.status_code == 400 or error["code"] == "response_not_found"
    elif response.headers["content-type"].startswith("text/event-stream"):
        last = json.loads(response.text.removesuffix("\n\n").rpartition("\ndata: ")[2])["type"]
        assert last in ("message_stop", "response.completed", "response.incomplete")
    else:
        assert response.json()["usage"]["output_tokens"] >= 1
    assert service.state.engine.num_live() == 0


@settings(
    max_examples=examples(60),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    body=st.binary(max_size=40) | st.text(alphabet='{}[]":,0123456789eE+-.truefalsn\\ud8', max_size=40).map(str.encode)
)
def test_any_bytes_get_a_400(service: Service, body: bytes) -> None:
    try:
        msgspec.json.decode(body, type=schema.CompletionRequest)
    except (msgspec.MsgspecError, ValueError):
        response = service.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400

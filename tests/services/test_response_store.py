"""What is kept of the responses: so many, so large, so long, and each for its own key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from services.errors import internal
from services.formats import Usage
from services.responses.answer import Response
from services.responses.schema import ResponsesRequest
from services.responses.store import ResponseStore


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def response_of(id: str, *, tenant: str = "", over: bool = True, text: str = "x", background: bool = False) -> Response:
    made = Response(
        id=id,
        tenant=tenant,
        created=0,
        model="m",
        temperature=1.0,
        top_p=1.0,
        request=ResponsesRequest(background=background),
        items=[{"type": "message", "role": "user", "content": text}],
        kept=True,
    )
    if over:
        made.finish("stop", Usage(1, 1, 0))
    return made


def stored(store: ResponseStore, *responses: Response) -> Callable[[], str]:
    """Put them in; what tells which are still there."""
    for response in responses:
        store.put(response)
    return lambda: "".join(response.id for response in responses if store.get(response.id, None) is not None)


def test_the_oldest_make_room_for_more() -> None:
    there = stored(ResponseStore(2, 10**6, 60, Clock()), *(response_of(id) for id in "abc"))
    assert there() == "bc"


def test_the_oldest_make_room_for_longer_ones() -> None:
    store = ResponseStore(10, 5000, 60, Clock())
    there = stored(store, response_of("a"), response_of("b"), response_of("c", text="x" * 4000))
    assert there() == "c"
    assert store.size <= 5000
    store.put(response_of("d", text="x" * 6000))
    assert (there(), len(store), store.size) == ("", 0, 0)


def test_they_are_kept_for_a_while() -> None:
    clock = Clock()
    store = ResponseStore(10, 10**6, 60, clock)
    there = stored(store, response_of("a"))
    clock.now = 40
    both = stored(store, response_of("b"))
    clock.now = 60
    assert there() + both() == "ab"
    clock.now = 61
    assert there() + both() == "b"
    clock.now = 101
    assert (there() + both(), store.size) == ("", 0)


def test_what_is_too_old_goes_without_anybody_asking() -> None:
    clock = Clock()
    store = ResponseStore(10, 10**6, 60, clock)
    store.put(response_of("a"))
    clock.now = 61
    store.sweep()
    assert (len(store), store.size) == (0, 0)


def test_one_under_way_is_kept_whatever_comes_and_from_its_end_on_it_counts() -> None:
    clock = Clock()
    store = ResponseStore(1, 10**6, 60, clock)
    running = response_of("a", over=False)
    there = stored(store, running, response_of("b"))
    clock.now = 1000
    assert there() == "a"
    running.finish("stop", Usage(1, 1, 0))
    store.put(running)
    clock.now = 1060
    assert there() == "a"
    clock.now = 1061
    assert there() == ""


def test_putting_one_again_counts_it_once() -> None:
    store = ResponseStore(10, 10**6, 60, Clock())
    response = response_of("a")
    store.put(response)
    size = store.size
    store.put(response)
    assert (len(store), store.size) == (1, size)
    assert size == len(msgspec.json.encode(response.items)) + len(msgspec.json.encode(response.payload()))


@pytest.mark.parametrize(("tenant", "seen"), [("key-0", True), ("key-1", False), ("", False), (None, True)])
def test_a_tenant_sees_its_own(tenant: str | None, seen: bool) -> None:
    store = ResponseStore(10, 10**6, 60, Clock())
    store.put(response_of("a", tenant="key-0"))
    assert (store.get("a", tenant) is not None) == seen
    assert store.delete("a", tenant) == seen
    assert (store.get("a", None) is None) == seen


@pytest.mark.parametrize("end", ["finish", "fail", "cancel"])
def test_a_response_ends_once(end: str) -> None:
    response = response_of("a", over=False)
    aborted: list[bool] = []
    response.abort = lambda: aborted.append(True)
    ends: dict[str, Callable[[], Any]] = {
        "finish": lambda: response.finish("stop", Usage(1, 1, 0)),
        "fail": lambda: response.fail(internal()),
        "cancel": response.cancel,
    }
    ends[end]()
    status = response.status
    response.fail(internal())
    response.cancel()
    assert response.status == status == {"finish": "completed", "fail": "failed", "cancel": "cancelled"}[end]
    assert aborted == ([True] if end == "cancel" else [])
    assert (response.payload()["error"] is not None) == (end == "fail")

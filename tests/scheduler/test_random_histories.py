"""Random histories: whatever happens in whatever order, invariants hold and each stream is what it would be alone."""

from __future__ import annotations

from typing import Any

from harness import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.messages import RequestStatus
from tests.scheduler.isolated import Isolated, default_sample

EVENTS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 70), st.integers(1, 40), st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("preempt"), st.integers(0, 30)),
    st.tuples(st.just("fail"), st.just(0)),
)


def sample_with_ends(request_id: int, position: int) -> int:
    """Ends now and then, at a place that only the request and the position decide."""
    if (request_id * 31 + position * 17) % 29 == 0:
        return 2
    return default_sample(request_id, position)


def alone(request_id: int, num_prompt: int, max_tokens: int, capacity: int) -> list[int]:
    """The slow, obvious model: sample until the end token, the limit, or the pool's capacity."""
    tokens: list[int] = []
    while len(tokens) < max_tokens and num_prompt + len(tokens) < capacity + 1:
        tokens.append(sample_with_ends(request_id, num_prompt + len(tokens)))
        if tokens[-1] == 2:
            break
    return tokens


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    events=st.lists(EVENTS, min_size=5, max_size=40),
    usable=st.integers(5, 14),
    delay=st.integers(0, 3),
    budget=st.sampled_from([5, 16, 64]),
    slots=st.integers(1, 6),
    queue=st.sampled_from(["fcfs", "priority"]),
    preset=st.sampled_from(["triptych", "vllm"]),
    caching=st.booleans(),
)
def test_streams_equal_their_undisturbed_twins(
    events: list[tuple[Any, ...]],
    usable: int,
    delay: int,
    budget: int,
    slots: int,
    queue: str,
    preset: str,
    caching: bool,
) -> None:
    isolated = Isolated(
        usable,
        delay=delay,
        sample=sample_with_ends,
        max_num_batched_tokens=budget,
        max_num_seqs=slots,
        queue_policy=queue,
        preset=preset,
        enable_prefix_caching=caching,
        max_step_failures=1000,
    )
    asked: dict[int, tuple[int, int]] = {}
    for event in events:
        kind = event[0]
        if kind == "add":
            request_id, (_, length, outputs, group, priority) = len(asked) + 1, event
            shared = [300 + group * 100 + j for j in range(min(length, 40))] if group else []
            own = [default_sample(request_id, j) for j in range(length - len(shared))]
            asked[request_id] = (length, outputs)
            salt = "s" if group == 3 else ""
            isolated.add(
                request_id, shared + own, max_tokens=outputs, priority=priority, ignore_eos=False, cache_salt=salt
            )
        elif kind == "step":
            for _ in range(event[1]):
                isolated.step()
        elif kind == "abort":
            isolated.abort(event[1])
        elif kind == "preempt":
            request = isolated.core.requests.get(event[1])
            if request is not None and request.status == RequestStatus.RUNNING:
                isolated.core.preempt(request)
        elif kind == "fail" and not isolated.pending and isolated.core.has_requests:
            isolated.fail_next()
    isolated.drain()
    capacity = usable * 16
    for request_id, (length, outputs) in asked.items():
        got = isolated.tokens.get(request_id, [])
        if length > capacity:
            assert request_id in isolated.rejected
            continue
        whole = alone(request_id, length, outputs, capacity)
        if isolated.status(request_id) == RequestStatus.ABORTED:
            assert got == whole[: len(got)]
        else:
            assert got == whole
            ended = whole[-1] == 2
            assert isolated.status(request_id) == (RequestStatus.STOPPED if ended else RequestStatus.LENGTH)

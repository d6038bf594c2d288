"""What holds for every policy, preset, recovery and depth, whatever happens in whatever order.

Random histories run against a runner whose tokens are tagged with request and position and whose pages hold what was
really written, beside the slow and obvious model: what each request would have said alone.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from harness import examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from protocol.messages import FetchKv, GrammarStatus, KvStatus, RequestStatus
from scheduler.config import ADMISSION_NAMES, BATCH_NAMES, PRESET_NAMES, QUEUE_NAMES, RECOVERY_NAMES, VICTIM_NAMES
from scheduler.presets import PRESETS
from tests.scheduler.isolated import Isolated, default_sample, limits

S = RequestStatus
TENANTS = ("", "a", "b")
SALTS = ("", "s")

KINDS = {
    "plain": 6,
    "grammar": 1,
    "remote": 1,
    "open": 1,
}
EVENTS = st.one_of(
    st.tuples(
        st.just("add"),
        st.integers(1, 70),
        st.integers(1, 40),
        st.integers(0, 3),
        st.sampled_from([0, 1, 3, 20]),
        st.sampled_from([kind for kind, times in KINDS.items() for _ in range(times)]),
    ),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.sampled_from(["abort", "preempt", "extend", "repeat"]), st.integers(1, 20)),
    st.tuples(st.sampled_from(["fail", "lose", "answer", "late", "reset"]), st.integers(0, 5)),
)
CONFIGS = st.fixed_dictionaries(
    {
        "preset": st.sampled_from(PRESET_NAMES),
        "queue_policy": st.sampled_from(("", *QUEUE_NAMES)),
        "admission_policy": st.sampled_from(("", *ADMISSION_NAMES)),
        "batch_policy": st.sampled_from(("", *BATCH_NAMES)),
        "victim_policy": st.sampled_from(("", *VICTIM_NAMES)),
        "recovery_policy": st.sampled_from(("", *RECOVERY_NAMES)),
        "max_num_batched_tokens": st.sampled_from([5, 16, 64]),
        "max_num_seqs": st.integers(1, 6),
        "watermark": st.sampled_from([0.0, 0.1]),
        "enable_prefix_caching": st.booleans(),
        "queue_fallback_waiting": st.sampled_from([0, 3, 128]),
        "max_bypasses": st.sampled_from([0, 2]),
        "max_queue_age_s": st.sampled_from([0.0, 0.02]),
        "long_prefill_token_threshold": st.sampled_from([0, 7]),
    }
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


class History:
    """Carries events out, and remembers what was asked."""

    def __init__(self, usable: int, delay: int, host_blocks: int, config: dict[str, Any]) -> None:
        self.isolated = Isolated(
            usable,
            delay=delay,
            sample=sample_with_ends,
            limit=limits(usable, host_blocks=host_blocks, kv_bytes_per_block=1024),
            **{"max_step_failures": 1000, **config},
        )
        self.core = self.isolated.core
        self.capacity = usable * 16
        self.asked: dict[int, tuple[list[int], int]] = {}
        self.orders: list[Any] = []

    def play(self, event: tuple[Any, ...]) -> None:
        kind = event[0]
        if kind == "add":
            self._add(*event[1:])
        elif kind == "step":
            for _ in range(event[1]):
                self.step()
        elif kind == "abort":
            self.isolated.abort(event[1])
        elif kind == "preempt":
            self.isolated.preempt(event[1])
        elif kind == "extend":
            self._extend(event[1], last=event[1] % 2 == 0)
        elif kind == "repeat" and self.isolated.pending:
            self.core.update(self.isolated.pending[-1])  # out of order; its own turn comes again later
            self.isolated.collect()
        elif kind == "fail":
            self.isolated.fail_next()
        elif kind == "lose" and event[1] == 0:
            self.isolated.lose_runner()
            self.orders.clear()
        elif kind == "answer":
            self.answer(arrived=event[1] * 16)
        elif kind == "late":
            self.isolated.now += event[1] * 10_000_000
        elif kind == "reset":
            self.isolated.control("reset_prefix_cache", running="true" if event[1] == 0 else "false")
        assert not self.core.check()

    def _add(self, length: int, outputs: int, group: int, priority: int, kind: str) -> None:
        request_id = len(self.asked) + 1
        shared = [300 + group * 100 + j for j in range(min(length, 40))] if group else []
        prompt = shared + [default_sample(request_id, j) for j in range(length - len(shared))]
        self.asked[request_id] = (prompt, outputs)
        extra: dict[str, Any] = {
            "grammar": {"grammar": "json_schema:{}"},
            "remote": {"kv_source": "elsewhere"},
            "open": {"open": True},
            "plain": {},
        }[kind]
        self.isolated.add(
            request_id,
            list(prompt),
            max_tokens=outputs,
            priority=priority,
            ignore_eos=False,
            cache_salt=SALTS[group == 3],
            tenant=TENANTS[request_id % 3],
            routing_key=str(group),
            deadline_ms=length,
            **extra,
        )

    def _extend(self, request_id: int, *, last: bool) -> None:
        request = self.core.requests.get(request_id)
        if request is not None and request.open:
            more = [default_sample(request_id, 5000 + j) for j in range(request_id % 5)]
            self.asked[request_id][0].extend(more)
            self.isolated.extend(request_id, more, last=last)

    def answer(self, arrived: int) -> None:
        """The runner's word on the oldest errand."""
        self.orders += self.isolated.orders()
        if not self.orders:
            return
        order = self.orders.pop(0)
        if isinstance(order, FetchKv):
            prompt = self.asked[order.id][0]
            if arrived >= order.num_tokens:
                self.isolated.deliver_kv(order, prompt, order.num_tokens)
            else:
                self.core.on_kv_status(KvStatus(order.id, order.incarnation, 0, "lost"))
        else:
            self.core.on_grammar_status(GrammarStatus(order.id, ""))
        self.isolated.collect()

    def step(self) -> None:
        self.isolated.step()

    def drain(self, most: int) -> int:
        """Finish everything, closing sessions and answering what was asked. Returns the number of passes."""
        for passes in range(most + 1):
            self.orders += self.isolated.orders()
            if not self.core.has_requests and not self.isolated.pending and not self.orders:
                self.isolated.check_drained()
                return passes
            for request in list(self.core.requests.values()):
                if request.open:
                    self._extend(request.id, last=True)
            self.answer(arrived=1 << 20)
            self.step()
        left = {r.id: r.status.name for r in self.core.requests.values()}
        raise AssertionError(f"still live after {most} passes: {left}")

    def compare(self) -> None:
        """Each stream is what it would have been alone, or begins like it."""
        for request_id, (prompt, outputs) in self.asked.items():
            got = self.isolated.tokens.get(request_id, [])
            if request_id in self.isolated.rejected:
                reserved = outputs - 1 if self.core.strategies.admission.reserves else 0
                assert len(prompt) + reserved > self.capacity and not got
                continue
            status = self.isolated.status(request_id)
            whole = alone(request_id, len(prompt), outputs, self.capacity)
            if status == S.IGNORED:
                assert len(prompt) > self.capacity and not got
            elif status == S.ABORTED:
                assert got == whole[: len(got)]
            else:
                assert got == whole
                assert status == (S.STOPPED if whole[-1] == 2 else S.LENGTH)

    def bound(self) -> int:
        """Passes within which everything that is live now ends: see docs/guarantees.md."""
        live = [self.asked[request_id] for request_id in self.core.requests]
        work = sum(len(prompt) + outputs + 16 for prompt, outputs in live)
        return (len(live) + 1) * (work + 16 + self.isolated.delay) + len(self.orders)


history = settings(
    max_examples=examples(50),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    derandomize=True,
)


@history
@given(
    events=st.lists(EVENTS, min_size=5, max_size=40),
    usable=st.integers(5, 14),
    delay=st.integers(0, 3),
    host_blocks=st.sampled_from([0, 3, 30]),
    config=CONFIGS,
)
@example(  # whoever runs alone lacks a block that a waiter behind it holds: it must not make way for itself for ever
    events=[("add", 49, 1, 0, 0, "remote"), ("step", 1), ("add", 9, 23, 0, 0, "open")],
    usable=5,
    delay=2,
    host_blocks=0,
    config={
        "preset": "triptych",
        "queue_policy": "lof",
        "max_num_batched_tokens": 5,
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
        "max_queue_age_s": 0.0,
    },
)
def test_every_stream_equals_its_undisturbed_twin_and_everything_ends_within_the_bound(
    events: list[tuple[Any, ...]], usable: int, delay: int, host_blocks: int, config: dict[str, Any]
) -> None:
    past = History(usable, delay, host_blocks, config)
    for event in events:
        past.play(event)
    past.drain(past.bound())
    past.compare()


@pytest.mark.parametrize("preset", [name for name in PRESET_NAMES if PRESETS[name].guarded])
@settings(max_examples=examples(15), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    load=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 80)), min_size=2, max_size=9),
    usable=st.integers(6, 12),
    victim=st.sampled_from(VICTIM_NAMES),
    most=st.integers(1, 3),
    host_blocks=st.sampled_from([0, 20]),
    delay=st.integers(0, 3),
)
def test_a_guarded_preset_preempts_nobody_more_often_than_its_bound(
    preset: str,
    load: list[tuple[int, int]],
    usable: int,
    victim: str,
    most: int,
    host_blocks: int,
    delay: int,
) -> None:
    config = {"preset": preset, "victim_policy": victim, "max_preemptions": most, "recovery_policy": "swap"}
    past = History(usable, delay, host_blocks, config)
    for length, outputs in load:
        past.play(("add", length, outputs, 0, 0, "plain"))
    past.drain(past.bound())
    past.compare()
    assert max(end.num_preemptions for end in past.isolated.finished.values()) <= most


@history
@given(
    load=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 80)), min_size=2, max_size=8),
    usable=st.integers(6, 12),
    delay=st.integers(0, 3),
    queue=st.sampled_from(QUEUE_NAMES),
    budget=st.sampled_from([7, 64]),
)
def test_credit_admission_never_preempts(
    load: list[tuple[int, int]], usable: int, delay: int, queue: str, budget: int
) -> None:
    past = History(usable, delay, 0, {"preset": "credit", "queue_policy": queue, "max_num_batched_tokens": budget})
    for length, outputs in load:
        past.play(("add", length, outputs, length % 3, 0, "plain"))
    past.drain(past.bound())
    past.compare()
    assert past.core.stats.preemptions == 0


@settings(max_examples=examples(20), deadline=None, derandomize=True)
@given(first=st.integers(1, 90), salts=st.tuples(st.sampled_from(["", "x", "y"]), st.sampled_from(["", "x", "y"])))
def test_salts_never_share_and_a_hit_is_contiguous_and_leaves_a_token(first: int, salts: tuple[str, str]) -> None:
    isolated = Isolated(32)
    prompt = [100 + j for j in range(first)]
    isolated.add(1, prompt, max_tokens=2, cache_salt=salts[0])
    isolated.drain()
    isolated.add(2, prompt, max_tokens=2, cache_salt=salts[1])
    isolated.drain()
    expected = (first - 1) // 16 * 16 if salts[0] == salts[1] else 0
    assert isolated.finished[2].num_cached_tokens == expected


@settings(max_examples=examples(20), deadline=None, derandomize=True)
@given(
    others=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=4),
    delay=st.integers(0, 3),
    meddling=st.lists(st.sampled_from(["duplicate", "stale epoch", "abort", "nothing"]), min_size=8),
)
def test_late_repeated_and_reordered_results_and_aborts_never_change_another_request(
    others: list[tuple[int, int]], delay: int, meddling: list[str]
) -> None:
    isolated = Isolated(64, delay=delay)
    isolated.add(99, 20, max_tokens=30)
    for request_id, (prompt, outputs) in enumerate(others, start=1):
        isolated.add(request_id, prompt, max_tokens=outputs)
    for turn, what in enumerate(meddling):
        isolated.step()
        if what == "abort":
            isolated.abort(turn % len(others) + 1)
        elif isolated.pending and what == "duplicate":
            copy = isolated.pending[0]
            isolated.core.update(copy)
            isolated.core.update(copy)
        elif isolated.pending and what == "stale epoch":
            isolated.core.update(msgspec.structs.replace(isolated.pending[0], epoch=0))
        isolated.collect()
    isolated.drain()
    assert isolated.tokens[99] == [default_sample(99, 20 + n) for n in range(30)]
    for request_id, (prompt, outputs) in enumerate(others, start=1):
        whole = [default_sample(request_id, prompt + n) for n in range(outputs)]
        assert isolated.tokens.get(request_id, []) == whole[: len(isolated.tokens.get(request_id, []))]
        assert isolated.status(request_id) in (S.LENGTH, S.ABORTED)

"""The simulated runner: reproducible tokens, the cost model on a virtual clock, and its strictness about pages."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.columns import f32, i32
from protocol.messages import NewRequest, SamplingParams, Step
from protocol.settings import SettingError
from runner.config import RunnerConfig
from runner.sim import SimulatedExecutor
from tests.runner.kit import GREEDY, generate, new, sim, step, tokens_of

ROOT = Path(__file__).parents[2]
PROMPT = [5, 6, 7, 8, 9, 10]


def outputs(count: int = 12, **kwargs: object) -> list[int]:
    executor = sim()
    return generate(lambda s: executor.execute(s, 0), PROMPT, count, size=4, **kwargs)


def test_it_imports_neither_torch_nor_a_model() -> None:
    code = "import sys, runner.sim, runner.main; print('torch' in sys.modules, 'gguf' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_tokens_are_the_same_whole_chunked_and_resumed_at_every_position() -> None:
    whole = outputs()
    assert len(set(whole)) > 6
    for chunk in (1, 3, 4, 5):
        assert outputs(chunk=chunk) == whole
    for cut in range(1, 12):
        resumed = outputs(emitted=whole[:cut], incarnation=2, first_page=20)
        assert whole[:cut] + resumed == whole


def test_tokens_are_the_same_in_a_batch() -> None:
    alone = outputs(count=3)
    executor = sim()
    other = new(2, [1, 2, 3], [20, 21], params=SamplingParams(max_tokens=9, seed=9))
    mine = new(1, PROMPT, [1, 2, 3])
    got = [executor.execute(step(1, {2: 3, 1: 6}, arrivals=[other, mine]), 0)]
    got += [executor.execute(step(number, {2: 1, 1: 1}), 0) for number in (2, 3)]
    assert [tokens_of(result)[1] for result in got] == alone


def test_seed_choice_prompt_and_simulator_seed_all_change_the_stream() -> None:
    variants = [
        outputs(),
        outputs(params=SamplingParams(max_tokens=64, seed=2)),
        outputs(params=SamplingParams(max_tokens=64, seed=1, choice=1)),
    ]
    other = sim()
    variants.append(generate(lambda s: other.execute(s, 0), [*PROMPT[:-1], 11], 12, size=4))
    seeded = sim(sim_seed=5)
    variants.append(generate(lambda s: seeded.execute(s, 0), PROMPT, 12, size=4))
    assert len({tuple(variant) for variant in variants}) == 5


def test_tokens_stay_in_the_configured_range_and_avoid_the_end_unless_a_rate_asks_for_it() -> None:
    def many(**changes: object) -> list[int]:
        executor = sim(sim_first_token_id=990, sim_eos_token_id=995, **changes)
        return generate(lambda s: executor.execute(s, 0), PROMPT, 50, size=4)

    assert set(many()) == set(range(990, 1000)) - {995}
    assert 0 < many(sim_eos_rate=0.3).count(995) < 40
    assert set(many(sim_eos_rate=1.0)) == {995}


def test_the_end_waits_for_min_tokens() -> None:
    executor = sim(sim_eos_rate=1.0)
    row = SamplingParams(max_tokens=9, seed=1, min_tokens=4)
    found = generate(lambda s: executor.execute(s, 0), PROMPT, 6, size=4, params=row)
    assert [token == 2 for token in found] == [False] * 4 + [True] * 2


def test_logprobs_are_those_of_the_uniform_distribution() -> None:
    executor = sim()
    asked = SamplingParams(max_tokens=9, seed=1, logprobs=3)
    (entry,) = executor.execute(step(1, {1: 6}, arrivals=[new(1, PROMPT, [1, 2], params=asked)]), 0).logprobs
    assert (entry.id, entry.position, entry.rank) == (1, 6, 1)
    assert len(i32(entry.top_ids)) == 3 and (f32(entry.top_logprobs) == f32(entry.top_logprobs)[0]).all()


# --- time -----------------------------------------------------------------------------------------------------


class VirtualClock:
    """Time that only sleeping moves; every sleep is `late_ns` late, as real ones are."""

    def __init__(self, late_ns: int = 0) -> None:
        self.now = 0
        self._late_ns = late_ns

    def read(self) -> int:
        return self.now

    def sleep_until(self, deadline: int) -> None:
        self.now = max(self.now, deadline + self._late_ns)


def timed(late_ns: int = 0, **changes: object) -> tuple[VirtualClock, SimulatedExecutor]:
    clock = VirtualClock(late_ns)
    config = RunnerConfig(backend="sim", sim_num_blocks=64, **changes)
    return clock, SimulatedExecutor(config, clock_ns=clock.read, sleep_until_ns=clock.sleep_until)


def test_queued_steps_start_back_to_back_so_late_wake_ups_never_add_up() -> None:
    clock, executor = timed(late_ns=70_000, sim_step_ms=10.0)
    executor.execute(step(1, {1: 3}, arrivals=[new(1, [1, 2, 3], [1, 2, 3, 4, 5, 6, 7])]), received_ns=0)
    for number in range(2, 102):
        executor.execute(step(number, {1: 1}), received_ns=clock.now - 5_000_000)
    assert clock.now == 101 * 10_000_000 + 70_000


def test_a_step_that_comes_late_starts_when_it_comes() -> None:
    clock, executor = timed(sim_step_ms=10.0)
    executor.execute(step(1, {1: 3}, arrivals=[new(1, [1, 2, 3], [1])]), received_ns=0)
    clock.now = 50_000_000
    executor.execute(step(2, {1: 1}), received_ns=50_000_000)
    assert clock.now == 60_000_000


def test_tokens_cost_what_the_model_says() -> None:
    clock, executor = timed(sim_step_ms=2.0, sim_token_us=100.0)
    executor.execute(step(1, {1: 30}, arrivals=[new(1, range(30), [1, 2])]), received_ns=0)
    assert clock.now == 5_000_000


# --- strictness -----------------------------------------------------------------------------------------------


def failure(*steps_: Step, **changes: object) -> str:
    """The code of the last step's failure; the steps before must succeed."""
    executor = sim(**changes)
    for one in steps_[:-1]:
        result = executor.execute(one, 0)
        assert result.failure is None, result.failure
    result = executor.execute(steps_[-1], 0)
    return "" if result.failure is None else result.failure.code


FILL = step(1, {1: 8}, arrivals=[new(1, range(8), [1, 2, 3])])


@pytest.mark.parametrize(
    ("second", "code"),
    [
        (step(2, {2: 4}, arrivals=[new(2, range(8), [1, 4], num_computed=4)]), ""),
        (step(2, {2: 4}, arrivals=[new(2, range(8), [1, 3], num_computed=4)]), "page_conflict"),
        (step(2, {2: 4}, arrivals=[new(2, range(8), [9, 4], num_computed=4)]), "unwritten_page"),
        (step(2, {2: 4}, arrivals=[new(2, range(8), [1, 4, 4], num_computed=4)]), "page_conflict"),
        (step(2, {2: 4}, arrivals=[new(2, range(12), [1, 2, 3], num_computed=8)]), "page_conflict"),
        (step(2, {1: 1}, grow={1: [2]}), "page_conflict"),
        (step(2, {2: 8}, arrivals=[new(2, range(8), [1, 2])], left=[1]), ""),
        (step(2, {2: 8, 1: 1}, arrivals=[new(2, range(8), [1, 2])], left=[1]), "unknown_request"),
        (step(2, {2: 2}, arrivals=[new(2, range(8), [1, 4], num_computed=6)]), "unwritten_page"),
        (step(2, {1: 2}), "bad_step"),
        (step(2, {5: 1}), "unknown_request"),
    ],
    ids=[
        "sharing full pages is fine",
        "writes into a live request's page",
        "reads a page that was never written",
        "one page twice in a table",
        "the page in use as its own",
        "grows by a page in use",
        "reuse after leaving",
        "still named after leaving",
        "half a page that was not swapped in",
        "past its known tokens",
        "never heard of",
    ],
)
def test_a_scheduler_that_breaks_the_paging_rules_is_told_in_that_step(second: Step, code: str) -> None:
    assert failure(FILL, second) == code


def test_two_requests_may_not_grow_by_the_same_page_in_one_step() -> None:
    two = step(1, {1: 4, 2: 4}, arrivals=[new(1, range(4), [1]), new(2, range(4), [2])])
    assert failure(two, step(2, {1: 1, 2: 1}, grow={1: [3], 2: [3]})) == "page_conflict"


def test_a_prefix_filled_in_the_same_step_may_be_shared_at_once() -> None:
    both = step(1, {1: 8, 2: 4}, arrivals=[new(1, range(8), [1, 2]), new(2, range(8), [1, 3], num_computed=4)])
    assert failure(both) == ""
    late = step(1, {1: 2, 2: 4}, arrivals=[new(1, range(8), [1, 2]), new(2, range(8), [1, 3], num_computed=4)])
    assert failure(late) == "unwritten_page"


def test_a_page_that_only_a_failed_step_wrote_counts_as_unwritten() -> None:
    executor = sim()
    executor.execute(step(1, {1: 8, 99: 1}, arrivals=[new(1, range(8), [1, 2])]), 0)
    hit = executor.execute(step(2, {2: 4}, arrivals=[new(2, range(8), [1, 3], num_computed=4)]), 0)
    assert hit.failure is not None and hit.failure.code in ("unwritten_page", "voided_page")


def swapping(arrival: NewRequest, *, back: list[int], out: list[int] | None = None) -> str:
    host = {"swap_space_bytes": 8 << 20}
    gone = step(2, {2: 4}, arrivals=[new(2, range(50, 54), [1])], left=[1], swap_out=out or [1, 0, 2, 1])
    return failure(FILL, gone, step(3, {1: 1}, arrivals=[arrival], swap_in=back), **host)


def test_swapped_pages_come_back_elsewhere_with_what_they_held() -> None:
    resumed = new(1, range(9), [8, 9, 10], num_computed=8, num_prompt=8, incarnation=2)
    assert swapping(resumed, back=[8, 0, 9, 1]) == ""
    assert swapping(resumed, back=[8, 0]) == "unwritten_page"
    assert swapping(resumed, back=[8, 0, 9, 2]) == "unwritten_page"


def test_a_half_filled_page_can_be_swapped_too() -> None:
    executor = sim(swap_space_bytes=8 << 20)
    executor.execute(step(1, {1: 6}, arrivals=[new(1, range(6), [1, 2])]), 0)
    executor.execute(step(2, {2: 4}, arrivals=[new(2, range(4), [1])], left=[1], swap_out=[1, 0, 2, 1]), 0)
    back = new(1, range(7), [5, 6], num_computed=6, num_prompt=6, incarnation=2)
    assert tokens_of(executor.execute(step(3, {1: 1}, arrivals=[back], swap_in=[5, 0, 6, 1]), 0))


def test_swapping_into_a_page_in_use_or_past_the_host_pool_is_refused() -> None:
    resumed = new(1, range(9), [1, 9, 10], num_computed=8, num_prompt=8, incarnation=2)
    assert swapping(resumed, back=[1, 0, 9, 1]) == "page_conflict"
    assert swapping(resumed, back=[8, 0, 9, 8]) == "over_limit"


def test_lenient_mode_leaves_the_pages_alone() -> None:
    hit = step(2, {2: 4}, arrivals=[new(2, range(8), [9, 4], num_computed=4)])
    assert failure(FILL, hit, sim_strict=False) == ""


def test_the_requests_of_a_failed_step_come_back_with_a_higher_incarnation() -> None:
    executor = sim()
    executor.execute(FILL, 0)
    assert executor.execute(step(2, {1: 1, 99: 1}), 0).failure is not None
    assert executor.num_residents == 0
    sampled = tokens_of(executor.execute(FILL, 0))
    again = executor.execute(
        step(3, {1: 9}, arrivals=[new(1, [*range(8), sampled[1]], [1, 2, 3], num_prompt=8, incarnation=2)]), 0
    )
    assert i32(again.incarnations).tolist() == [2] and i32(again.positions).tolist() == [9]


def test_a_request_whose_parameters_cannot_be_used_fails_alone() -> None:
    executor = sim()
    bad = new(2, range(4), [2], params=SamplingParams(max_tokens=5, allowed_token_ids=(5000,)), incarnation=7)
    both = executor.execute(step(1, {1: 4, 2: 4}, arrivals=[new(1, range(4), [1]), bad]), 0)
    assert list(tokens_of(both)) == [1]
    assert [(error.id, error.incarnation, error.code) for error in both.errors] == [(2, 7, "no_allowed_tokens")]
    # The step after was already on its way: the failed row is passed over, not a fault.
    after = executor.execute(step(2, {1: 1, 2: 1}, grow={1: [5], 2: [6]}), 0)
    assert list(tokens_of(after)) == [1] and not after.errors


def test_what_a_refused_request_computes_may_be_shared() -> None:
    bad = new(1, range(9), [1, 2, 3], params=SamplingParams(max_tokens=5, allowed_token_ids=(5000,)))
    first = step(1, {1: 4}, arrivals=[bad])
    chunk = step(2, {1: 5, 2: 4}, arrivals=[new(2, range(12), [1, 2, 8], num_computed=8)])
    assert failure(first, chunk) == ""


def test_rows_that_were_not_in_a_failed_step_are_not_disturbed_by_it() -> None:
    undisturbed = outputs(count=4)
    executor = sim()
    both = [new(1, PROMPT, [1, 2, 3]), new(2, [1, 2, 3], [20])]
    got = [tokens_of(executor.execute(step(1, {1: 6, 2: 3}, arrivals=both), 0))]
    assert executor.execute(step(2, {2: 1, 99: 1}), 0).failure is not None
    # Sent before the failure was known: the void row is passed over, with what it grows by.
    got.append(tokens_of(executor.execute(step(3, {2: 1, 1: 1}, grow={2: [21], 1: [4]}), 0)))
    again = new(2, [1, 2, 3, got[0][2]], [20, 21], num_prompt=3, incarnation=2)
    got.append(tokens_of(executor.execute(step(4, {2: 4, 1: 1}, arrivals=[again]), 0)))
    got.append(tokens_of(executor.execute(step(5, {1: 1, 2: 1}), 0)))
    assert [found.keys() for found in got] == [{1, 2}, {1}, {1, 2}, {1, 2}]
    assert [found[1] for found in got] == undisturbed


def test_nobody_may_count_on_pages_that_a_void_request_was_to_fill() -> None:
    executor = sim(sim_strict=False)
    executor.execute(step(1, {2: 3}, arrivals=[new(2, range(8), [20])]), 0)
    assert executor.execute(step(2, {2: 1, 99: 1}), 0).failure is not None
    grown = step(3, {2: 4}, grow={2: [21]}, filled={21: b"h" * 16})
    assert executor.execute(grown, 0).failure is None and len(executor.inventory) == 0
    hit = step(4, {5: 4}, arrivals=[new(5, range(8), [21, 30], num_computed=4)])
    result = executor.execute(hit, 0)
    assert result.failure is not None and result.failure.code == "voided_page"
    cold = step(5, {5: 8}, arrivals=[new(5, range(8), [21, 30], incarnation=2)])
    assert tokens_of(executor.execute(cold, 0))


@pytest.mark.parametrize("field", ["ids", "num_tokens", "left", "grow_rows", "filled_blocks", "swap_in"])
def test_a_column_of_broken_length_fails_the_step_and_nothing_more(field: str) -> None:
    import msgspec

    executor = sim()
    broken = msgspec.structs.replace(FILL, **{field: b"\x01\x02\x03"})
    result = executor.execute(broken, 0)
    assert result.failure is not None
    assert tokens_of(executor.execute(step(2, {3: 4}, arrivals=[new(3, range(4), [1])]), 0))


@pytest.mark.parametrize(
    "odd",
    [
        step(2, {1: 1}, filled={64: b"h" * 16}),
        step(2, {1: 1}, filled={0: b"h" * 16}),
        step(2, {1: 1}, filled={1: b"short"}),
    ],
    ids=["a page that doesn't exist", "the null page", "a hash of the wrong size"],
)
def test_filled_blocks_that_make_no_sense_fail_the_step_before_it_runs(odd: Step) -> None:
    executor = sim()
    executor.execute(FILL, 0)
    result = executor.execute(odd, 0)
    assert result.failure is not None and result.failure.code == "bad_step" and len(executor.inventory) == 0


def test_a_step_without_rows_only_forgets() -> None:
    executor = sim()
    executor.execute(FILL, 0)
    result = executor.execute(step(2, {}, left=[1]), 0)
    assert tokens_of(result) == {} and executor.num_residents == 0


def test_settings_that_leave_no_ids_are_refused() -> None:
    with pytest.raises(SettingError, match="sim_eos_token_id"):
        RunnerConfig(backend="sim", sim_vocab_size=10, sim_eos_token_id=10)
    with pytest.raises(SettingError, match="sim_first_token_id"):
        RunnerConfig(backend="sim", sim_vocab_size=10, sim_first_token_id=9)
    assert GREEDY.temperature == 0


def test_a_step_that_computes_the_poisonous_token_fails_and_others_run() -> None:
    executor = sim(sim_poison_token=77)
    both = [new(1, [5, 6, 77, 8], [1]), new(2, [1, 2, 3], [2])]
    first = executor.execute(step(1, {1: 2, 2: 3}, arrivals=both), 0)
    assert set(tokens_of(first)) == {2}
    failed = executor.execute(step(2, {1: 2, 2: 1}), 0).failure
    assert failed is not None and failed.code == "device_error" and "77" in failed.message
    assert tokens_of(executor.execute(step(3, {2: 3}, arrivals=[new(2, [1, 2, 3], [2])]), 0))


def test_a_poisonous_token_can_kill_the_process() -> None:
    code = (
        "from tests.runner.kit import new, sim, step\n"
        "executor = sim(sim_poison_token=77, sim_poison_fault='kill')\n"
        "executor.execute(step(1, {1: 2}, arrivals=[new(1, [5, 77], [1])]), 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == -signal.SIGKILL

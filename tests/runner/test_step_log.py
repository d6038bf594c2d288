"""The log of steps: what it keeps, for how long, and that the runner's private socket tells it."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest

from ops.calibrate.steps import StepReader, StepsError, find_runtime_dir
from protocol.exposition import new_registry, serve_metrics
from protocol.messages import StepResult
from runner.config import RunnerConfig
from runner.sim import SimulatedExecutor, sim_cost, sim_limits
from runner.step_costs import LinearCost
from runner.step_log import StepLog, StepPage
from runner.steps import StepSize
from tests.runner.kit import new, sim, step

LIMITS = sim_limits(RunnerConfig(backend="sim"))


def log_of(count: int, capacity: int = 8) -> StepLog:
    log = StepLog(LIMITS, capacity)
    for number in range(count):
        result = StepResult(1, number, queue_ns=5, execute_ns=100, copy_ns=7)
        log.add(StepSize(number, 10 * number, 1), result, 1000 * number + 1000)
    return log


def page(log: StepLog, **query: str) -> StepPage:
    return msgspec.json.decode(log.page(query), type=StepPage)


def test_a_step_is_kept_with_its_size_and_its_times() -> None:
    kept = page(log_of(3))
    assert kept.limits == LIMITS
    assert (kept.first, kept.tokens, kept.context, kept.rows) == (0, [0, 1, 2], [0, 10, 20], [1, 1, 1])
    assert (kept.received_ns[2], kept.started_ns[2], kept.ended_ns[2], kept.copy_ns[2]) == (2895, 2900, 3000, 7)


@pytest.mark.parametrize(("since", "tokens"), [(0, list(range(12, 20))), (18, [18, 19]), (20, []), (99, [])])
def test_the_last_steps_are_kept_and_asked_for_by_number(since: int, tokens: list[int]) -> None:
    kept = page(log_of(20), since=str(since))
    assert kept.tokens == tokens
    assert kept.first == (tokens[0] if tokens else since)


def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="since: 'x' is not a number"):
        log_of(1).page({"since": "x"})


def test_an_executor_tells_the_size_of_the_step_that_ran_last() -> None:
    executor = sim()
    executor.execute(step(1, {1: 6}, arrivals=[new(1, range(6), [1, 2])]), 0)
    assert executor.step_size == StepSize(6, 6, 1)
    executor.execute(step(2, {2: 3, 1: 1}, arrivals=[new(2, range(7), [3, 4])]), 0)
    assert executor.step_size == StepSize(4, 3 + 7, 2)


def test_the_simulated_cost_has_all_numbers_of_the_linear_model() -> None:
    config = RunnerConfig(
        backend="sim", sim_step_ms=5.0, sim_token_us=40.0, sim_context_ns=44.0, sim_row_us=2.0, sim_overlap=True
    )
    assert sim_cost(config) == LinearCost(5_000_000, 40_000, 44, 2_000, overlap=True)
    assert sim_cost(RunnerConfig()) == LinearCost(10_000_000, 0, 0, 0, overlap=False)
    now = [0]

    def sleep_until(deadline: int) -> None:
        now[0] = max(now[0], deadline)

    executor = SimulatedExecutor(config, clock_ns=lambda: now[0], sleep_until_ns=sleep_until)
    executor.execute(step(1, {1: 300}, arrivals=[new(1, range(300), list(range(1, 20)))]), received_ns=0)
    assert now[0] == 300 * 40_000 + 300 * 44 + 2_000


# --- over the socket ------------------------------------------------------------------------------------------


def test_steps_are_served_on_the_private_socket_only(runtime_dir: Path) -> None:
    log = log_of(20)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = f"{runtime_dir}/runner.metrics.sock"
    with serve_metrics(new_registry("runner"), unix_path=path, port=port, pages={"/steps": log.page}):
        reader = StepReader(str(runtime_dir))
        assert reader.skip() == LIMITS
        log.add(StepSize(77, 1, 1), StepResult(1, 20, execute_ns=50), 10**6)
        steps = reader.read()
        assert (steps.first, steps.tokens.tolist()) == (20, [77])
        assert len(reader.read()) == 0
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(b"GET /steps HTTP/1.0\r\n\r\n")
            assert b" 404 " in client.recv(100)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            client.sendall(b"GET /steps?since=x HTTP/1.0\r\n\r\n")
            assert b" 400 " in client.recv(100)


def test_a_runner_that_is_not_there_is_named(runtime_dir: Path) -> None:
    with pytest.raises(StepsError, match=f"no steps from {runtime_dir}/runner.metrics.sock"):
        StepReader(str(runtime_dir)).read()
    assert find_runtime_dir("given", {"TRIPTYCH_RUNTIME_DIR": "other"}) == "given"
    assert find_runtime_dir(None, {"TRIPTYCH_RUNTIME_DIR": "other"}) == "other"


def test_only_a_step_that_had_been_received_before_counts_for_the_pause(runtime_dir: Path) -> None:
    log = StepLog(LIMITS)
    for size, queue_ns, ended in ((1, 0, 1000), (2, 300, 1120), (0, 5, 9000), (4, 50, 9100)):
        log.add(StepSize(size, 9, 1), StepResult(1, 1, queue_ns=queue_ns, execute_ns=100, copy_ns=10), ended)
    with serve_metrics(
        new_registry("runner"), unix_path=f"{runtime_dir}/runner.metrics.sock", pages={"/steps": log.page}
    ):
        steps = StepReader(str(runtime_dir)).read()
    assert steps.pauses().tolist() == [20, 0]
    samples = steps.samples(3)
    assert samples.tokens.tolist() == [1, 2, 4], "a step without tokens is no sample"
    assert samples.ns.tolist() == [90, 90, 90]
    assert samples.group.tolist() == [3, 3, 3]

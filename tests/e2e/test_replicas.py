"""`triptych serve --data-parallel-size 2`: two runners under one scheduler, killed in turn while streams run."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from harness import Command, Server, running_command, running_server, wait_until

from tests.e2e.kit import client_of, samples_of
from tests.e2e.operate import ctl, runtime_dir_of
from tests.e2e.test_takeover import SIM, Stream, begun, texts_of, went_on

TWO = ("--data-parallel-size", "2")
RANK_ENV = "TRIPTYCH_DATA_PARALLEL_RANK"


@pytest.fixture(scope="module")
def pair() -> Iterator[Server]:
    """Two simulated runners that are started again at once."""
    with running_server(*SIM, *TWO, "--restart-backoff-s", "0.1") as server:
        wait_for_both(server)
        yield server


def wait_for_both(server: Server) -> None:
    """Wait until both replicas are up."""
    wait_until(lambda: server.request("GET", "/ready").json().get("replicas_up") == 2, 150, "both replicas")


def runner(server: Command, number: int) -> psutil.Process:
    """The process of one replica."""
    for child in psutil.Process(server.pid).children():
        if "runner" in child.cmdline() and child.environ()[RANK_ENV] == str(number):
            return child
    raise AssertionError(f"no runner {number}")


def computed_by(server: Server) -> float:
    """Tokens that both runners have computed."""
    seen = samples_of(server)
    return sum(seen[f"triptych_runner_tokens_computed_total{{replica={number}}}"] for number in (0, 1))


def running_on(server: Server) -> list[float]:
    """How many requests each replica runs."""
    return [one["running"] for one in ctl(server, "status")["replicas"]]


def test_streams_run_on_both_and_the_metrics_tell_the_replicas_apart(pair: Server) -> None:
    streams = [Stream(pair, f"prompt {number}", 300) for number in range(4)]
    begun(streams)
    assert running_on(pair) == [2, 2]
    assert [len(stream.end()) > 0 for stream in streams] == [True] * 4
    seen = samples_of(pair)
    for number in (0, 1):
        assert seen[f"triptych_scheduler_runner_up{{replica={number}}}"] == 1
        assert seen[f"triptych_runner_steps_total{{replica={number}}}"] > 0
    assert seen["triptych_scheduler_api_processes"] == 1
    assert pair.request("GET", "/health").json() == {"status": "ok", "reason": None, "replicas": 2, "replicas_up": 2}


def test_prompts_with_a_prefix_in_common_and_choices_of_one_prompt_land_on_one_replica(pair: Server) -> None:
    client = client_of(pair)
    before = samples_of(pair)
    system = "You are a helpful assistant who answers with care. " * 30
    for number in range(4):
        client.completions.create(model="smollm2-135m-instruct", prompt=system + str(number), max_tokens=2)
    client.completions.create(model="smollm2-135m-instruct", prompt="short", max_tokens=2, n=4)

    def accepted() -> list[float] | None:
        after = samples_of(pair)
        names = [f"triptych_scheduler_requests_accepted_total{{replica={number}}}" for number in (0, 1)]
        more = [after[name] - before[name] for name in names]
        return sorted(more) if sum(more) == 8 else None

    assert wait_until(accepted, 60, "the metrics") in ([4, 4], [0, 8])


def test_a_killed_runner_comes_back_and_no_token_is_lost_or_repeated(pair: Server) -> None:
    expected = texts_of(pair, 400)
    for number in (0, 1):
        streams = [Stream(pair, f"prompt {number}", 400) for number in range(4)]
        begun(streams)
        runner(pair, number).send_signal(signal.SIGKILL)
        assert [stream.end() for stream in streams] == expected
        wait_for_both(pair)


def test_a_killed_scheduler_finds_both_runners_and_what_they_hold(pair: Server) -> None:
    before = computed_by(pair)
    prompts = [f"{number} is a number. " * 300 for number in range(4)]
    # While it lives the loads are such that the others go elsewhere than they would go without it, after the kill.
    first = Stream(pair, "first", 100)
    begun([first])
    streams = []
    for prompt in prompts:
        streams.append(Stream(pair, prompt, 500))
        begun(streams)
    first.end()
    pair.children()["scheduler"].send_signal(signal.SIGKILL)
    went_on(streams)
    texts = [stream.end() for stream in streams]
    wait_until(lambda: all(pair.log().count(f"replica {n}: epoch") >= 2 for n in (0, 1)), 60, "it to say so")
    wait_until(lambda: samples_of(pair).get("triptych_scheduler_requests_running{replica=0}") == 0, 60, "idle replicas")
    computed = computed_by(pair) - before
    usage = client_of(pair).completions.create(model="smollm2-135m-instruct", prompt=prompts[0], max_tokens=1).usage
    assert usage is not None and usage.prompt_tokens > 1000
    again = computed - 4 * (usage.prompt_tokens + 500) - 100
    assert again < usage.prompt_tokens / 2, "each went back to where its prompt had been computed"
    assert [Stream(pair, prompt, 500).end() for prompt in prompts] == texts


def test_a_scheduler_is_replaced_by_hand_with_all_its_runners(pair: Server) -> None:
    expected = texts_of(pair, 300)
    streams = [Stream(pair, f"prompt {number}", 300) for number in range(4)]
    begun(streams)
    environment = {"TRIPTYCH_RUNTIME_DIR": runtime_dir_of(pair)}
    with running_command("scheduler", "--takeover", *TWO, env=environment) as successor:
        successor.wait_for_log("in the place of the former scheduler")
        assert [stream.end() for stream in streams] == expected
        assert successor.log().count("epoch") >= 2
        successor.process.kill()
        successor.process.wait()
    wait_until(lambda: "scheduler" in pair.children(), 60, "the supervisor's own scheduler")
    assert Stream(pair, "prompt 0", 300).end() == expected[0]
    wait_for_both(pair)


def test_requests_of_a_runner_that_hangs_go_on_with_the_other(pair: Server) -> None:
    expected = texts_of(pair, 400)
    streams = [Stream(pair, f"prompt {number}", 400) for number in range(4)]
    begun(streams)
    hung = runner(pair, 0)
    hung.send_signal(signal.SIGSTOP)
    try:
        assert [stream.end() for stream in streams] == expected
        moved = "replica 0 has no runner: 2 of its requests go on elsewhere"
        wait_until(lambda: moved in pair.log(), 60, "the scheduler to say so")
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):  # its supervisor may have lost patience with it
            hung.send_signal(signal.SIGCONT)
    wait_for_both(pair)


def test_serving_begins_with_the_first_runner_and_ctrl_c_ends_all() -> None:
    with running_server(*SIM, *TWO, ready=False) as server:
        wait_until(server.is_ready, 60, "the first replica")
        wait_for_both(server)
        stream = Stream(server, "prompt", 20_000)
        begun([stream])
        assert server.stop(signal.SIGINT) == 0
        server.assert_no_orphans()
        assert "runner-0 | " in server.log() and "runner-1 | " in server.log()


def test_replicas_by_hand_are_named_by_their_addresses(runtime_dir: Path) -> None:
    addresses = [f"ipc://{runtime_dir}/a.sock", f"ipc://{runtime_dir}/b.sock"]
    environment = {"TRIPTYCH_RUNTIME_DIR": str(runtime_dir)}
    with (
        running_command("scheduler", "--runner-address", ",".join(addresses), env=environment) as scheduler,
        running_command(
            "runner", "--backend", "sim", "--runner-address", addresses[1], "--data-parallel-rank", "1", env=environment
        ) as second,
    ):
        scheduler.wait_for_log("replica 1: epoch")
        assert "replica 0: epoch" not in scheduler.log()
        with running_command(
            "runner", "--backend", "sim", "--runner-address", addresses[0], "--data-parallel-rank", "0", env=environment
        ):
            scheduler.wait_for_log("replica 0: epoch")
        scheduler.wait_for_log("the runner of replica 0")
        assert second.process.poll() is None and scheduler.stop() == 0


def test_the_real_model_on_two_runners_says_across_a_kill_what_it_says_undisturbed() -> None:
    real = ("--dtype", "float32", "--num-threads", "1")
    with running_server(*real, *TWO, "--restart-backoff-s", "0.1") as server:
        wait_for_both(server)
        expected = texts_of(server, 40, 2)
        streams = [Stream(server, f"prompt {number}", 40) for number in range(2)]
        begun(streams)
        assert running_on(server) == [1, 1]
        runner(server, 1).send_signal(signal.SIGKILL)
        assert [stream.end() for stream in streams] == expected

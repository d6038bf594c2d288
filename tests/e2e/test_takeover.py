"""Processes that are replaced, killed or stopped while streams run: nothing is lost, and the loser says why it ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from harness import Command, Server, running_command, running_server, wait_until

from protocol.places import holder_pid
from protocol.process import EXIT_REPLACED
from tests.e2e.kit import samples_of
from tests.e2e.operate import runtime_dir_of

SIM = ("--backend", "sim", "--sim-step-ms", "5", "--sim-max-model-len", "50000")
STREAM_DEADLINE_S = 90.0


class Stream:
    """A streamed completion, read in a thread; `ids` grows while it runs."""

    def __init__(self, server: Server, prompt: str, tokens: int) -> None:
        self.text = ""
        self.pieces = 0
        self.finish: str | None = None
        self.failure = ""
        self._body = {"model": "smollm2-135m-instruct", "prompt": prompt, "max_tokens": tokens, "stream": True}
        self._body |= {"seed": 7, "temperature": 1.0, "ignore_eos": True}
        self._port = server.port
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=STREAM_DEADLINE_S)
        with contextlib.closing(connection):
            try:
                connection.request("POST", "/v1/completions", json.dumps(self._body))
                for line in connection.getresponse():
                    self._take(line)
            except (OSError, http.client.HTTPException) as error:
                self.failure = repr(error)

    def _take(self, line: bytes) -> None:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "choices" not in event:
                self.failure = line.decode()
                return
            self.text += event["choices"][0]["text"]
            self.pieces += 1
            self.finish = event["choices"][0]["finish_reason"] or self.finish

    def end(self) -> str:
        """The whole text, which must be complete."""
        self._thread.join(STREAM_DEADLINE_S)
        assert not self._thread.is_alive() and not self.failure and self.finish == "length", (self.failure, self.finish)
        return self.text


def begun(streams: Sequence[Stream]) -> None:
    """Wait until each has said something."""
    wait_until(lambda: all(stream.pieces > 2 for stream in streams), 60, "all streams to begin")


def went_on(streams: Sequence[Stream]) -> None:
    """Wait until each has said something more, or has ended."""
    before = [stream.pieces for stream in streams]

    def all_on() -> bool:
        return all(stream.pieces > count or stream.finish for stream, count in zip(streams, before, strict=True))

    wait_until(all_on, 60, "all streams to go on")


def texts_of(server: Server, tokens: int, count: int = 4) -> list[str]:
    """What nobody disturbs."""
    streams = [Stream(server, f"prompt {number}", tokens) for number in range(count)]
    return [stream.end() for stream in streams]


@contextlib.contextmanager
def taking_over(server: Server, *flags: str) -> Iterator[Command]:
    """A scheduler started by hand in the place of the server's."""
    environment = {"TRIPTYCH_RUNTIME_DIR": runtime_dir_of(server)}
    with running_command("scheduler", "--takeover", *flags, env=environment) as command:
        yield command


def status_of(server: Server, key: str) -> float:
    return samples_of(server).get(key, 0.0)


@pytest.fixture(scope="module")
def chain() -> Iterator[Server]:
    """A chain whose scheduler is replaced again and again."""
    with running_server(*SIM) as server:
        yield server


@pytest.fixture(scope="module")
def patient() -> Iterator[Server]:
    """A chain in which nobody is killed for hanging, and a runner that says nothing for two seconds is stuck."""
    with running_server(*SIM, "--hang-timeout-s", "0", "--runner-silence-s", "2") as server:
        yield server


@pytest.mark.parametrize(
    "flags",
    [
        ("--preset", "vllm"),
        ("--preset", "sglang"),
        ("--scheduler-cls", "tests.conformance.newest_first:NewestFirst"),
    ],
    ids=["preset", "other preset", "other class"],
)
def test_a_scheduler_is_replaced_by_hand_while_streams_run_and_no_token_is_lost(
    chain: Server, flags: tuple[str, ...]
) -> None:
    begin = len(chain.log())
    expected = texts_of(chain, 300)
    former = chain.children()["scheduler"]
    streams = [Stream(chain, f"prompt {number}", 300) for number in range(4)]
    begun(streams)
    with taking_over(chain, *flags) as successor:
        successor.wait_for_log("in the place of the former scheduler")
        wait_until(lambda: not former.is_running(), 60, "the end of the former scheduler")
        assert [stream.end() for stream in streams] == expected
        wait_until(lambda: "another scheduler has taken over" in chain.log()[begin:], 60, "it to say why")
        wait_until(lambda: "it is left alone" in chain.log()[begin:], 60, "the supervisor to say so")
        wait_until(lambda: f"pid {successor.pid} has the place" in chain.log(), 60, "the supervisor to see who")
        assert "scheduler" not in chain.children()
        assert status_of(chain, "triptych_runner_unsent_results_total") == 0, "steps in flight were completed"
        assert successor.process.poll() is None
        successor.process.kill()
        wait_until(lambda: "scheduler" in chain.children(), 60, "the supervisor's own scheduler")
        assert Stream(chain, "prompt 0", 300).end() == expected[0]
        successor.process.wait()


def test_the_real_model_says_the_same_across_a_takeover_and_a_kill() -> None:
    with running_server("--dtype", "float32", "--num-threads", "1") as server:
        expected = texts_of(server, 60, 2)
        streams = [Stream(server, f"prompt {number}", 60) for number in range(2)]
        begun(streams)
        with taking_over(server, "--preset", "vllm") as successor:
            successor.wait_for_log("in the place of the former scheduler")
            went_on(streams)
            successor.process.kill()
            assert [stream.end() for stream in streams] == expected
            successor.process.wait()


def test_a_second_scheduler_without_takeover_says_who_holds_the_place_and_ends(chain: Server) -> None:
    stream = Stream(chain, "prompt", 300)
    begun([stream])
    holder = chain.children()["scheduler"].pid
    with running_command("scheduler", env={"TRIPTYCH_RUNTIME_DIR": runtime_dir_of(chain)}) as second:
        assert second.wait() == EXIT_REPLACED
        assert f"another live process listens there: pid {holder}, since 20" in second.log()
        assert "--takeover" in second.log()
    assert stream.end() and status_of(chain, "triptych_scheduler_epoch") > 0


def test_of_two_schedulers_started_in_one_instant_one_serves_and_the_other_says_who_does(runtime_dir: Path) -> None:
    environment = {"TRIPTYCH_RUNTIME_DIR": str(runtime_dir)}
    with running_command("scheduler", env=environment) as one, running_command("scheduler", env=environment) as other:
        wait_until(lambda: holder(runtime_dir), 60, "a winner")
        winner, loser = (one, other) if holder(runtime_dir) == one.pid else (other, one)
        assert loser.wait() == EXIT_REPLACED
        assert f"another live process listens there: pid {winner.pid}, since 20" in loser.log()
        assert holder(runtime_dir) == winner.pid and winner.process.poll() is None
        assert winner.stop() == 0
    assert os.listdir(runtime_dir) == []


def holder(runtime_dir: Path) -> int | None:
    return holder_pid(str(runtime_dir / "scheduler.sock"))


def test_a_second_scheduler_elsewhere_does_not_get_the_runner_and_says_who_has_it(chain: Server) -> None:
    grants = status_of(chain, "triptych_runner_scheduler_grants_total")
    place = runtime_dir_of(chain)
    environment = {
        "TRIPTYCH_RUNTIME_DIR": f"{place}/second",
        "TRIPTYCH_RUNNER_ADDRESS": f"ipc://{place}/runner.sock",
        "TRIPTYCH_LEASE_S": "1",
    }
    holder = chain.children()["scheduler"].pid
    with running_command("scheduler", env=environment) as second:
        assert second.wait() == 3
        assert f"(pid {holder} on " in second.log() and "holds this runner under epoch" in second.log()
    assert Stream(chain, "prompt", 20).end()
    assert status_of(chain, "triptych_runner_scheduler_grants_total") == grants > 0


def test_a_process_that_is_stopped_is_killed_and_replaced_and_its_streams_go_on() -> None:
    with running_server(*SIM, "--hang-timeout-s", "2") as server:
        expected = texts_of(server, 300, 2)
        for role in ("scheduler", "runner"):
            streams = [Stream(server, f"prompt {number}", 300) for number in range(2)]
            begun(streams)
            os.kill(server.children()[role].pid, signal.SIGSTOP)
            assert [stream.end() for stream in streams] == expected
            assert f"{role} hangs (no sign of life for" in server.log()


def test_a_stopped_runner_that_nobody_kills_is_reported_as_stuck_and_its_late_results_count_no_more(
    patient: Server,
) -> None:
    expected = texts_of(patient, 300, 2)
    streams = [Stream(patient, f"prompt {number}", 300) for number in range(2)]
    begun(streams)
    runner = patient.children()["runner"]
    os.kill(runner.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: b"the runner is stuck" in patient.request("GET", "/health").body, 60, "a stuck runner")
        assert patient.request("GET", "/health").status == 503
    finally:
        os.kill(runner.pid, signal.SIGCONT)
    assert [stream.end() for stream in streams] == expected
    assert status_of(patient, "triptych_scheduler_runner_stuck") == 0
    assert patient.children()["runner"].pid == runner.pid


def test_a_stopped_scheduler_that_was_replaced_by_hand_ends_when_it_wakes_up(patient: Server) -> None:
    expected = texts_of(patient, 300, 2)
    streams = [Stream(patient, f"prompt {number}", 300) for number in range(2)]
    begun(streams)
    former = patient.children()["scheduler"]
    os.kill(former.pid, signal.SIGSTOP)
    with taking_over(patient) as successor:
        successor.wait_for_log("in the place of the former scheduler, which hangs")
        went_on(streams)
        os.kill(former.pid, signal.SIGCONT)
        wait_until(lambda: not former.is_running(), 60, "the end of the former scheduler")
        wait_until(lambda: "another scheduler has taken over" in patient.log(), 60, "it to say why")
        assert [stream.end() for stream in streams] == expected
        assert successor.process.poll() is None
        assert Stream(patient, "prompt 0", 300).end() == expected[0], "its socket is still the one that is found"


def test_a_step_that_never_returns_ends_the_runner_and_its_streams_go_on_with_the_next() -> None:
    """Each swap of a block takes minutes here: the first step with one never returns in time."""
    slow = ("--recovery-policy", "swap", "--swap-space-bytes", str(64 << 20), "--sim-copy-gb-s", "0.00001")
    small = ("--num-blocks-override", "24", "--max-model-len", "320", "--step-deadline-s", "1")
    with running_server(*SIM, *small, *slow) as server:
        expected = Stream(server, "prompt 0", 250).end()
        first, other = (Stream(server, f"prompt {number}", 250) for number in range(2))
        wait_until(lambda: "a step has not returned for" in server.log(), 40, "the deadline")
        wait_until(lambda: "runner exited with status 5" in server.log(), 60, "the end of the runner")
        assert first.end() == expected and other.end()


@pytest.mark.parametrize(
    ("signum", "order"),
    [
        (signal.SIGKILL, ("supervisor",)),
        (signal.SIGKILL, ("api", "scheduler", "runner", "supervisor")),
        (signal.SIGKILL, ("runner", "supervisor")),
        (signal.SIGTERM, ("supervisor",)),
        (signal.SIGTERM, ("scheduler", "api", "supervisor")),
        (signal.SIGTERM, ("supervisor", "runner")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else value.name,
)
def test_whoever_is_killed_first_nothing_is_left(signum: signal.Signals, order: tuple[str, ...]) -> None:
    with running_server(*SIM) as server:
        place = runtime_dir_of(server)
        streams = [Stream(server, f"prompt {number}", 2000) for number in range(2)]
        begun(streams)
        processes = {**server.children(), "supervisor": psutil.Process(server.pid)}
        for role in order:
            with contextlib.suppress(psutil.NoSuchProcess):
                processes[role].send_signal(signum)
        server.wait()
        server.assert_no_orphans()
        if signum == signal.SIGTERM:
            assert not os.path.exists(place)
        else:
            wait_until(lambda: not os.path.exists(place), 60, "the removal of the sockets")


def test_a_second_signal_ends_all_at_once_while_streams_run() -> None:
    with running_server(*SIM, env={"TRIPTYCH_SHUTDOWN_GRACE_S": "600"}) as server:
        place = runtime_dir_of(server)
        begun([Stream(server, "prompt", 40000)])
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.request("GET", "/ready").status == 503, 60, "/ready to say no")

        def ends_when_told_again() -> bool:
            server.process.send_signal(signal.SIGTERM)  # one that comes at once is taken for an echo of the first
            return server.process.poll() is not None

        wait_until(ends_when_told_again, 60, "the end")
        assert server.wait() == 130
        server.assert_no_orphans()
        assert not os.path.exists(place)

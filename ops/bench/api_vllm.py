"""vLLM's API server beside ours: the same streams from it, with its own engine and scheduler and no model.

Its executor is replaced by one that gives words (`in_vllm/words_executor.py`); its API server is a process of its own.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ops.bench.api_sample import Sample, Snapshot
from ops.bench.api_streams import StreamFailed, Streams
from ops.bench.processes import log_tail

EXECUTOR = Path(__file__).with_name("in_vllm")
MODEL = "peer"
CONTEXT = 200_000
"""No stream may end before the last one has begun."""
START_TIMEOUT_S = 300.0
STALL_S = 60.0


@dataclass(frozen=True, slots=True)
class VllmApi:
    """A running vLLM: the pid is that of its API server, whose child the engine is."""

    pid: int
    port: int
    log: Path

    def measure(self, streams: int, seconds: float, meanwhile: Callable[[], None]) -> Sample:
        """That many streams until the API server has used so much CPU time, once all of them have begun.

        `meanwhile` is called again and again.
        """
        opened = Streams("127.0.0.1", self.port, MODEL, streams, CONTEXT - 200)
        try:
            moved = time.monotonic()
            while not all(one.tokens for one in opened.all):
                before = opened.tokens
                opened.read(0.05)
                meanwhile()
                moved = time.monotonic() if opened.tokens > before else moved
                if time.monotonic() - moved > STALL_S:
                    raise StreamFailed(f"vLLM's streams don't begin; the end of its log:\n{log_tail(self.log)}")
            first = Snapshot.of(self.pid, opened)
            while Snapshot.of(self.pid, opened).cpu_s - first.cpu_s < seconds:
                opened.read(0.05)
                meanwhile()
            return first.until(Snapshot.of(self.pid, opened))
        finally:
            opened.close()


@contextmanager
def running_vllm(python: Path, model: Path, words: Sequence[int], step_ms: float, most: int) -> Iterator[VllmApi]:
    """`vllm serve` with steps of that least time, on a free port. StreamFailed if it doesn't start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as scratch, open(f"{scratch}/log", "w+b") as log:
        Path(scratch, "words").write_text(json.dumps(list(words)))
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "PYTHONPATH": str(EXECUTOR),
            "WORDS_FILE": f"{scratch}/words",
            "WORDS_STEP_MS": str(step_ms),
        }
        command = [str(python.with_name("vllm")), "serve", str(model), "--served-model-name", MODEL]
        command += ["--port", str(port), "--max-model-len", str(CONTEXT), "--max-num-seqs", str(most)]
        command += ["--hf-overrides", json.dumps({"max_position_embeddings": CONTEXT})]
        command += ["--dtype", "bfloat16", "--disable-uvicorn-access-log", "--no-async-scheduling"]
        command += ["--distributed-executor-backend", "words_executor.WordsExecutor"]
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # it would outlive this process
        try:
            _wait_healthy(process, port, Path(log.name))
            yield VllmApi(process.pid, port, Path(log.name))
        finally:
            signal.signal(signal.SIGTERM, before)
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2.0)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(0.5)
    raise StreamFailed(f"vLLM didn't start; the end of its log:\n{log_tail(log)}")

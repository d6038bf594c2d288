"""vLLM's scheduler in its own interpreter, driven line by line so that its steps can alternate with ours."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

SCRIPT = Path(__file__).with_name("vllm_scheduler.py")
ANSWER_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 10.0
LOG_TAIL = 2000


class PeerFailed(Exception):
    """The peer didn't start, died or fell silent; the message carries the end of what it printed."""


class Peer:
    """A running peer. Use as a context manager: it ends with the block."""

    def __init__(
        self, python: Path, model: Path, *, script: Path = SCRIPT, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        self._timeout_s = timeout_s
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        try:
            self._process = subprocess.Popen(
                [str(python), str(script), str(model)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=environment,
                text=True,
            )
        except OSError as error:
            self._log.close()
            raise PeerFailed(f"{python} can't be run: {error}") from error

    def load(self, running: int, prompt_len: int, max_steps: int) -> str:
        """Build its scheduler with `running` decodes. Returns its version. Raises PeerFailed."""
        answer = self._ask({"load": running, "prompt_len": prompt_len, "max_steps": max_steps})
        return str(answer["version"])

    def steps(self, count: int) -> list[tuple[int, int, int]]:
        """Run `count` steps: (schedule ns, update ns, rows) of each. Raises PeerFailed."""
        return [tuple(row) for row in self._ask({"steps": count})]

    def _ask(self, command: dict[str, int]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        watchdog = threading.Timer(self._timeout_s, self._process.kill)  # ends the readline below
        watchdog.start()
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            watchdog.cancel()
        if not line:
            self._process.wait(STOP_TIMEOUT_S)
            self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - LOG_TAIL))
            tail = self._log.read().decode("utf-8", "replace").strip()
            raise PeerFailed(f"the peer ended (exit code {self._process.returncode}):\n{tail}")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()  # the end of its input is its signal to leave
            self._process.wait(STOP_TIMEOUT_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

"""Runs schemathesis against a server and says in one line how it went; exit code 0 if nothing was found.

    python tests/outside/schemathesis_run.py --st .venv-conformance/schemathesis/bin/st

Without `--url` it starts a simulated server of its own, with an API key. Standard library only; schemathesis lives in
an environment of its own (`pip install -r tests/outside/requirements/schemathesis.txt`).
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEY = "right-key"
START_S = 60
RUN_S = 1800
# Left out: refusals of valid bodies are looked at by `refusals_have_a_reason` instead.
EXCLUDED = ("positive_data_acceptance",)
SERVER = (
    *("serve", "--backend", "sim", "--sim-step-ms", "1", "--sim-eos-rate", "0.05", "--sim-first-token-id", "100"),
    *("--sim-max-model-len", "2048"),
)


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running server, http://host:port; none: one of its own")
    parser.add_argument("--key", default="", help="its API key")
    parser.add_argument("--st", default=shutil.which("st") or "st", help="schemathesis' program")
    parser.add_argument("--max-examples", type=int, default=30, help="random cases for each operation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--phases", default="examples,coverage,fuzzing,stateful")
    parser.add_argument(
        "--log", default="", help="file for all that schemathesis says; none: only if it finds something"
    )
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url, key = arguments.url, arguments.key
        if not url:
            url, key = stack.enter_context(own_server()), KEY
        began = time.monotonic()
        code, output = run(arguments, url, key)
    if arguments.log:
        Path(arguments.log).write_text(output, encoding="utf-8")
    elif code:
        print(output)
    print(summary(output, code, time.monotonic() - began))
    return code


def run(arguments: argparse.Namespace, url: str, key: str) -> tuple[int, str]:
    """schemathesis' exit code and output."""
    command = [arguments.st, "run", f"{url}/openapi.json", "--phases", arguments.phases, "--no-color"]
    command += ["--exclude-checks", ",".join(EXCLUDED), "--continue-on-failure", "--request-timeout", "60"]
    command += ["--max-examples", str(arguments.max_examples), "--seed", str(arguments.seed)]
    # Random bodies that keep this many rules take some looking for.
    command += ["--suppress-health-check", "filter_too_much,too_slow,data_too_large"]
    if key:
        command += ["--header", f"Authorization: Bearer {key}"]
    path = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": path}
    with tempfile.TemporaryDirectory(prefix="st-") as directory:  # it keeps what it has found beside where it runs
        done = subprocess.run(
            command,
            env=environment,
            cwd=directory,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=RUN_S,
        )
    return done.returncode, done.stdout


def summary(output: str, code: int, seconds: float) -> str:
    """One line: passed or not, how many cases, how many operations, how long."""
    cases = re.search(r"(\d+) generated", output)
    tested = re.search(r"Tested: (\d+)", output)
    found = re.search(r"found (\d+) unique", output)
    words = "passed" if code == 0 else f"FAILED ({found[1]} failures)" if found else f"FAILED (exit code {code})"
    return (
        f"schemathesis: {words}; {cases[1] if cases else '?'} cases, {tested[1] if tested else '?'} operations, "
        f"{seconds:.0f} s"
    )


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    """A simulated server on a free port; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="tt-", dir="/tmp") as directory:
        environment = {**os.environ, "TRIPTYCH_RUNTIME_DIR": f"{directory}/run", "TRIPTYCH_API_KEY": KEY}
        command = [str(ROOT / ".venv/bin/triptych"), *SERVER, "--port", str(port)]
        log = Path(directory, "log")
        with log.open("w") as out, subprocess.Popen(command, env=environment, stdout=out, stderr=out) as process:
            try:
                wait_until_ready(port, process, log)
                yield f"http://127.0.0.1:{port}"
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(START_S)


def wait_until_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Returns once the server takes requests; SystemExit with its log if it doesn't."""
    pause, end = threading.Event(), time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        pause.wait(0.2)
    raise SystemExit(f"the server did not start:\n{log.read_text()}")


if __name__ == "__main__":
    sys.exit(main())

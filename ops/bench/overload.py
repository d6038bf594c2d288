"""`triptych bench overload`: very many clients at once against a short queue, and what that does to the server.

Plain asyncio streams, one connection a client, all in one process. It looks at what each client got, at the API
processes' memory, and at the scheduler's count of tokens; it measures no throughput.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from ops.bench.processes import ROLES, System, SystemFailed, system

SPARE_DESCRIPTORS = 200
ANSWER_TIMEOUT_S = 300.0


@dataclass(slots=True)
class Outcome:
    """What one client got: a status (0: none), how long it took (s), how many tokens, and whether it was all of it."""

    status: int = 0
    seconds: float = 0.0
    tokens: int = 0
    whole: bool = False
    retry_after: str = ""
    problem: str = ""


@dataclass(slots=True)
class Burst:
    """What all clients of one burst got."""

    outcomes: list[Outcome] = field(default_factory=list)

    def statuses(self) -> Counter[int]:
        """How many got which status."""
        return Counter(outcome.status for outcome in self.outcomes)

    def of(self, status: int) -> list[Outcome]:
        """Those with this status."""
        return [outcome for outcome in self.outcomes if outcome.status == status]

    def slowest(self, status: int) -> float:
        """The longest time to the end of an answer with this status, in seconds."""
        return max((outcome.seconds for outcome in self.of(status)), default=0.0)

    def faults(self, tokens: int) -> list[str]:
        """What no burst may show, however large, when each answer is to have `tokens` tokens."""
        found = [f"a client got no answer: {outcome.problem}" for outcome in self.of(0)]
        for outcome in self.of(503):
            if not outcome.retry_after.isdigit():
                found.append("a 503 came without Retry-After")
        for outcome in self.of(200):
            if not outcome.whole or outcome.tokens != tokens:
                found.append(f"an admitted client got {outcome.tokens} of {tokens} tokens, whole: {outcome.whole}")
        others = [status for status in self.statuses() if status not in (0, 200, 503)]
        return found + [f"answers had status {status}" for status in others]


def allow_connections(count: int) -> int:
    """Raise this process's limit of open files to hold `count` connections, or say how many it can hold."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE_DESCRIPTORS
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    return min(count, hard - SPARE_DESCRIPTORS)


def request_bytes(tokens: int) -> bytes:
    """One streamed completion of exactly `tokens` tokens."""
    asked = {"prompt": "Hello", "max_tokens": tokens, "ignore_eos": True, "stream": True, "return_token_ids": True}
    body = json.dumps(asked)
    head = "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


async def burst(host: str, port: int, clients: int, tokens: int) -> Burst:
    """Open all connections, then send every request in one go, and read every answer to its end."""
    ready, start = asyncio.Semaphore(0), asyncio.Event()
    tasks = [asyncio.create_task(_client(host, port, request_bytes(tokens), ready, start)) for _ in range(clients)]
    for _ in tasks:
        await ready.acquire()
    start.set()
    return Burst(list(await asyncio.gather(*tasks)))


async def _client(host: str, port: int, request: bytes, ready: asyncio.Semaphore, start: asyncio.Event) -> Outcome:
    outcome = Outcome()
    writer = None
    try:
        try:
            reader, writer = await asyncio.open_connection(host, port)
        finally:
            ready.release()
        await start.wait()
        began = time.monotonic()
        writer.write(request)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            answer = await reader.read(-1)
        outcome.seconds = time.monotonic() - began
        _read(answer, outcome)
    except (OSError, TimeoutError, ValueError, IndexError) as error:
        outcome.problem = f"{type(error).__name__}: {error}"
    finally:
        if writer is not None:
            writer.close()
    return outcome


def _read(answer: bytes, outcome: Outcome) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    status_line, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    outcome.status = int(status_line.split()[1])
    outcome.retry_after = headers.get("retry-after", "")
    if outcome.status != 200:
        outcome.whole = len(body) == int(headers["content-length"])
        return
    outcome.whole = body.endswith(b"0\r\n\r\n") and body.count(b"data: [DONE]") == 1
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            outcome.tokens += sum(len(choice["token_ids"] or ()) for choice in json.loads(line[6:])["choices"])


def resident_bytes(pid: int) -> int:
    """A process's resident memory."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()


def peak_bytes(pid: int) -> int:
    """The most that a process's resident memory has ever been."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def main(argv: Sequence[str]) -> int:
    """Runs the command; 1 if a client got what none may get."""
    parser = argparse.ArgumentParser(prog="triptych bench overload", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--clients", type=int, default=5000, help="connections at once (default 5000)")
    parser.add_argument("--bursts", type=int, default=3, help="how often (default 3)")
    parser.add_argument("--queue", type=int, default=64, help="the scheduler's queue limit (default 64)")
    parser.add_argument("--running", type=int, default=16, help="requests that run at once (default 16)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each answer (default 32)")
    parser.add_argument("--step-ms", type=float, default=10.0, help="time of a simulated step (default 10 ms)")
    parser.add_argument("--api-processes", type=int, default=1, help="API processes behind the port (default 1)")
    args = parser.parse_args(argv)
    clients = allow_connections(args.clients)
    if clients < args.clients:
        print(f"only {clients} clients: this process may not open more files")
    flags = ["--backend", "sim", "--sim-step-ms", str(args.step_ms), "--max-num-seqs", str(args.running)]
    flags += ["--max-num-queued-reqs", str(args.queue), "--api-processes", str(args.api_processes)]
    try:
        with system(flags) as running:
            return _measure(running, args, clients)
    except SystemFailed as error:
        print(f"triptych bench overload: {error}", file=sys.stderr)
        return 1


def _measure(running: System, args: argparse.Namespace, clients: int) -> int:
    where = urlsplit(running.base_url)
    assert where.hostname is not None and where.port is not None
    print(f"{clients} clients at once, {args.running} run, {args.queue} may wait; answers of {args.tokens} tokens")
    columns = f"{'burst':>6}{'200':>7}{'503':>7}{'slowest 503':>13}{'last 200':>10}"
    print(f"{columns}   resident MiB of api (its peak), scheduler, runner")
    faults: list[str] = []
    print(f"{'':>6}{'':>7}{'':>7}{'':>13}{'':>10}   {_memory(running)}")
    for number in range(1, args.bursts + 1):
        seen = asyncio.run(burst(where.hostname, where.port, clients, args.tokens))
        served, refused = len(seen.of(200)), len(seen.of(503))
        times = f"{seen.slowest(503):>11.2f} s{seen.slowest(200):>8.2f} s"
        print(f"{number:>6}{served:>7}{refused:>7}{times}   {_memory(running)}")
        faults += seen.faults(args.tokens)
    for fault, count in Counter(faults).most_common():
        print(f"FAULT ({count}): {fault}")
    return 1 if faults else 0


def _memory(running: System) -> str:
    """MiB by role, and the API's peak in brackets; several API processes together."""
    peak = 0
    pids = Path(f"/proc/{running.supervisor}/task/{running.supervisor}/children").read_text().split()
    held = dict.fromkeys(ROLES, 0)
    for pid in pids:
        role = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").rpartition(b"\0")[2].decode("utf-8", "replace")
        if role in held:
            held[role] += resident_bytes(int(pid))
            peak += peak_bytes(int(pid)) if role == "api" else 0
    sizes = [f"{held[role] / 2**20:.0f}" for role in ROLES]
    return f"{sizes[0]} ({peak / 2**20:.0f}), {', '.join(sizes[1:])}"

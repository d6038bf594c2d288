"""`triptych bench <command>`: picks the command; each has its own parser."""

from __future__ import annotations

import sys
from collections.abc import Sequence

USAGE = """usage: triptych bench <command> [options]

commands:
  serve      drive an OpenAI-compatible server with random or recorded traffic and report latency and throughput
  pipeline   start the three processes on a simulated runner and compare streamed tokens/s with what the steps allow
  api        stream out of one API process as fast as it can: what a token costs it, and what it adds to latency
  scheduler  time the scheduler alone: passes, updates, admission, its messages; beside vLLM's if you have it
  overload   thousands of clients at once against a short queue: who is served, who is refused, what memory it takes
  placement  play a trace on several simulated replicas: what choosing a replica by prefix is worth
  fidelity   play a trace against real processes and in a replay, and compare what clients saw

`triptych bench <command> --help` shows a command's options."""


def main(argv: Sequence[str]) -> int:
    """Runs one bench command and returns the process's exit code (2: usage)."""
    command, rest = (argv[0], list(argv[1:])) if argv else ("", [])
    if command == "serve":
        from ops.bench import serve

        return serve.main(rest)
    if command == "pipeline":
        from ops.bench import pipeline

        return pipeline.main(rest)
    if command == "api":
        from ops.bench import api

        return api.main(rest)
    if command == "scheduler":
        from ops.bench import scheduler

        return scheduler.main(rest)
    if command == "overload":
        from ops.bench import overload

        return overload.main(rest)
    if command == "fidelity":
        from ops.bench import fidelity

        return fidelity.main(rest)
    if command == "placement":
        from ops.bench import placement

        return placement.main(rest)
    if command in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    problem = f"unknown bench command {command!r}" if command else "a bench command is needed"
    print(f"triptych bench: {problem}\n\n{USAGE}", file=sys.stderr)
    return 2

"""`triptych keygen FILE`: the key pair that lets processes on several machines know each other."""

from __future__ import annotations

import sys

from protocol.security import write_keys

EXIT_FAILED, EXIT_USAGE = 1, 2

HELP = """\
usage: triptych keygen FILE

Writes a new CURVE key pair to FILE, which must not exist, readable by its owner alone. Give each process the same file
(--curve-key-file FILE): over TCP, runner and scheduler then let in only who has it, and nobody else can read along.
"""


def main(argv: list[str]) -> int:
    """The exit code: 0 written, 1 could not be, 2 wrong usage."""
    if argv in (["--help"], ["-h"]):
        print(HELP, end="")
        return 0
    if len(argv) != 1 or argv[0].startswith("-"):
        print(HELP, end="", file=sys.stderr)
        return EXIT_USAGE
    try:
        keys = write_keys(argv[0])
    except OSError as error:
        print(f"triptych keygen: {argv[0]}: {error.strerror}", file=sys.stderr)
        return EXIT_FAILED
    print(f"wrote {argv[0]} (public key {keys.public.decode()})")
    return 0

"""`make chaos`: long storms by hand, with a table and, if asked, JSON. The exit status says whether all was clean."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from tests.chaos.harness import BACKENDS, run
from tests.chaos.storm import KINDS


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """One storm; 0 when nothing was lost, repeated, different, malformed or leaked."""
    parser = argparse.ArgumentParser(prog="make chaos CHAOS_ARGS=…", description=__doc__)
    parser.add_argument("--backend", choices=BACKENDS, default="sim")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--each", type=int, default=20, metavar="N", help="disturbances of each kind")
    parser.add_argument("--only", nargs="*", choices=KINDS, default=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--at-once", type=float, default=0.15, metavar="SHARE", help="of those that follow at once")
    parser.add_argument("--together", action="store_true", help="stops, hangs and freezes hit all roles at once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    parser.add_argument("--log", type=Path, metavar="FILE", help="write the server's log there")
    parser.add_argument("--verbose", action="store_true", help="say each disturbance")
    options, extra = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    report = run(
        options.backend,
        options.seed,
        dict.fromkeys(options.only, options.each),
        at_once=options.at_once,
        together=options.together,
        extra=tuple(extra),
        say=_say if options.verbose else lambda line: None,
    )
    print(report.text())
    if options.json:
        options.json.write_text(json.dumps(report.json(), indent=2) + "\n")
    if options.log:
        options.log.write_text(report.log)
    return 0 if report.clean else 1


if __name__ == "__main__":
    sys.exit(main())

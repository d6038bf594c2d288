"""Container health check: exits 0 if the process of the given role can do its job now, 1 with a reason if not.

Standard library and sockets only: it runs every few seconds in every container, so start-up time counts.
Usage: healthcheck.py api|scheduler|runner
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys

TIMEOUT_S = 4.0
READY_METRICS = {
    "scheduler": ("triptych_scheduler_runner_up", "no runner has welcomed the scheduler, or it went silent"),
    "runner": ("triptych_runner_kv_blocks", "the runner has no KV pool"),
}
"""Role -> a gauge that is above 0 exactly while the role is ready, and what it means otherwise."""


class Unhealthy(Exception):
    """The process can't do its job; the message is what `docker inspect` shows."""


def fetch(family: int, address: str | tuple[str, int], path: str, *, tls: bool = False) -> tuple[int, str]:
    """Status and body of one GET over a TCP or unix socket. Raises Unhealthy if there is no HTTP answer."""
    try:
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            connection.settimeout(TIMEOUT_S)
            connection.connect(address)
            if tls:
                connection = stack.enter_context(encrypted(connection))
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
    except OSError as error:
        raise Unhealthy(f"{address}: {error}") from error
    head, _, body = answer.partition(b"\r\n\r\n")
    words = head.split(b"\r\n", 1)[0].split()
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        raise Unhealthy(f"{address}: no HTTP answer, but {head[:80]!r}")
    return int(words[1]), body.decode("utf-8", "replace")


def encrypted(connection: socket.socket) -> socket.socket:
    """The connection with TLS. Whose certificate it is doesn't matter here: it is this container's."""
    import ssl  # takes as long as all the rest together

    return ssl._create_unverified_context().wrap_socket(connection)


def check_api(port: int, *, tls: bool) -> None:
    """The API is ready when GET /ready says so: its scheduler and, behind it, a runner are there."""
    status, body = fetch(socket.AF_INET, ("127.0.0.1", port), "/ready", tls=tls)
    if status != 200:
        raise Unhealthy(f"/ready answers {status}: {body[:500]}")


def check_gauge(role: str, runtime_dir: str) -> None:
    """Scheduler and runner are ready when their metrics socket answers and the role's gauge is above 0."""
    metric, otherwise = READY_METRICS[role]
    status, text = fetch(socket.AF_UNIX, f"{runtime_dir}/{role}.metrics.sock", "/metrics")
    values = [line.rpartition(" ")[2] for line in text.splitlines() if line.split("{")[0].split(" ")[0] == metric]
    if status != 200 or not values:
        raise Unhealthy(f"{role}: {metric} is missing from the metrics (status {status})")
    if not any(float(value) > 0 for value in values):  # with several replicas one is enough to serve
        raise Unhealthy(f"{role}: {otherwise} ({metric} is {values[0]})")


def main(arguments: list[str]) -> int:
    """Checks the role named on the command line; returns the exit code."""
    if len(arguments) != 1 or arguments[0] not in ("api", *READY_METRICS):
        print(f"usage: healthcheck.py {'|'.join(('api', *READY_METRICS))}", file=sys.stderr)
        return 2
    role = arguments[0]
    try:
        if role == "api":
            tls = bool(os.environ.get("TRIPTYCH_SSL_CERTFILE"))
            check_api(int(os.environ.get("TRIPTYCH_PORT", "8000")), tls=tls)
        else:
            check_gauge(role, os.environ.get("TRIPTYCH_RUNTIME_DIR", "/run/triptych"))
    except Unhealthy as problem:
        print(problem)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`triptych serve`: what the supervisor runs, with which settings, and what a person is told when it is ready."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ops import replicas
from ops.child import Program
from ops.config import Loaded
from ops.models import model_and_name
from ops.runtime_dir import RuntimeDir
from ops.serve_config import ServeConfig
from ops.supervisor import EXIT_FAILED, RestartPolicy, Supervisor
from ops.unix_http import UnixConnection
from protocol.places import is_abandoned, listener_at
from protocol.settings import ENV_PREFIX, specs, to_text
from services.config import ApiConfig
from services.listen import BindError, listen
from services.neighbours import READY_PAGE

ROLES = ("runner", "scheduler", "api")
"""In start order; the API (one process or several), which drains with the others' help, is stopped first."""

PROBE_TIMEOUT_S = 2.0


def run(loaded: Loaded, environ: Mapping[str, str]) -> int:
    """Serve until a signal; the exit code."""
    config = loaded.get("serve", ServeConfig)
    api = loaded.get("api", ApiConfig)
    model, name = model_and_name(api.model, api.served_model_name if _is_given(loaded, "served_model_name") else "")
    try:
        # Bound before any weights are loaded, and open as long as this process: while no API process is there to
        # accept, clients wait instead of being refused.
        listener = listen(api)
    except BindError as error:
        print(f"triptych serve: {error}", file=sys.stderr)
        return EXIT_FAILED
    port = api.port if api.uds else listener.getsockname()[1]
    api = replace(api, served_model_name=name, port=port)
    with (
        contextlib.closing(_Listening(listener, api.uds)) as listening,
        RuntimeDir.use(config.runtime_dir) if config.runtime_dir else RuntimeDir.create(environ) as runtime,
    ):
        forced = {"runtime_dir": runtime.path, "model": str(model), "served_model_name": name, "port": port}
        numbered = [replace(api, runtime_dir=runtime.path, process_number=number) for number in _numbers(config)]

        def cleanup() -> None:
            listening.close()
            runtime.close()

        supervisor = Supervisor(
            programs(loaded, forced, environ, listener.fileno()),
            write=_write_line,
            probe=lambda: all(process_is_ready(one) for one in numbered) and is_ready(api),
            on_ready=lambda seconds: _write_line(banner(api, seconds)),
            policy=RestartPolicy(
                limit=config.restart_limit,
                backoff_s=config.restart_backoff_s,
                stable_after_s=config.restart_window_s,
                start_timeout_s=config.start_timeout_s,
                hang_timeout_s=config.hang_timeout_s,
            ),
            on_stop=listener.close,  # who comes when the last API process has gone is refused
            cleanup=cleanup,
        )
        count = len(replicas.numbers(loaded))
        runners = f"{count} runners" if count > 1 else "runner"
        _write_line(f"starting {runners}, scheduler and API for {name} (sockets in {runtime.path})")
        return supervisor.run()


def programs(
    loaded: Loaded, forced: Mapping[str, Any], environ: Mapping[str, str], listen_fd: int = -1
) -> list[Program]:
    """The child processes. Their settings travel in the environment, which other users can't read.

    All API processes accept from one socket, `listen_fd`.
    """
    config = loaded.get("serve", ServeConfig)
    api = loaded.get("api", ApiConfig)
    inherited = {name: value for name, value in environ.items() if not name.startswith(ENV_PREFIX)}
    runners = replicas.numbers(loaded)
    groups = {"api": config.api_processes > 1, "runner": len(runners) > 1}
    places = [("runner", number) for number in runners]
    places += [("scheduler", 0), *(("api", number) for number in _numbers(config))]
    found = []
    for role, number in places:
        fields = specs(type(loaded.configs[role]))
        values = {**loaded.given(role), **{name: value for name, value in forced.items() if name in fields}}
        values = {**values, "metrics_port": _metrics_port(loaded, role, number)}
        own: dict[str, str] = {}
        if role == "api":
            values |= {"listen_fd": listen_fd, "process_number": number}
        elif role == "runner":
            values |= replicas.settings(loaded, number, len(runners))
            own = replicas.environment(loaded, number, environ)
        settings = {fields[name].env: to_text(fields[name], value) for name, value in values.items()}
        place = _place_of(values, fields) if role == "scheduler" else ""
        found.append(
            Program(
                role=f"{role}-{number}" if groups.get(role) else role,
                argv=[sys.executable, "-m", "ops.cli", role],
                env={**inherited, "PYTHONUNBUFFERED": "1", **own, **settings},
                # The runner may still hold the session of the scheduler that died: the new one takes it over.
                restart_env={ENV_PREFIX + "TAKEOVER": "true"} if role == "scheduler" else {},
                stop_grace_s=config.stop_timeout_s + (api.shutdown_grace_s if role == "api" else 0.0),
                group=role if groups.get(role) else "",
                descriptors=(listen_fd,) if role == "api" and listen_fd >= 0 else (),
                holder=partial(listener_at, place) if place else lambda: None,
                abandoned=partial(is_abandoned, place) if place else lambda: True,
                beats=True,
            )
        )
    return found


def _place_of(values: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    """Where the scheduler serves APIs. Who does so can't be told over TCP: somebody, or nobody."""
    directory = values.get("runtime_dir", fields["runtime_dir"].default)
    return str(values.get("scheduler_address", "")) or f"ipc://{directory}/scheduler.sock"


def process_is_ready(api: ApiConfig) -> bool:
    """Whether this API process, of several perhaps, has found its scheduler and runner."""
    connection = UnixConnection(api.metrics_socket, PROBE_TIMEOUT_S)
    try:
        connection.request("GET", READY_PAGE)
        return connection.getresponse().read() == b"1"
    except (OSError, http.client.HTTPException):
        return False  # not there yet
    finally:
        connection.close()


def is_ready(api: ApiConfig) -> bool:
    """Whether `GET /ready` answers 200."""
    connection: http.client.HTTPConnection
    if api.uds:
        connection = UnixConnection(api.uds, PROBE_TIMEOUT_S)
    elif api.ssl_certfile:  # the question is whether it answers, not whether its name is the certificate's
        context = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection(
            _reachable(api.host), api.port, timeout=PROBE_TIMEOUT_S, context=context
        )
    else:
        connection = http.client.HTTPConnection(_reachable(api.host), api.port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/ready", headers={"Connection": "close"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False  # not listening yet, or not whole yet
    finally:
        connection.close()


def banner(api: ApiConfig, seconds: float) -> str:
    """What a person reads when all is ready: the address, the model id, and a command to paste."""
    scheme = "https" if api.ssl_certfile else "http"
    base = f"{scheme}://localhost" if api.uds else f"{scheme}://{_bracketed(_reachable(api.host))}:{api.port}"
    at = f"unix socket {api.uds}" if api.uds else base
    options = f" --unix-socket {api.uds}" if api.uds else ""
    if api.api_key or api.api_key_file:
        options += ' -H "Authorization: Bearer $API_KEY"'
    message = '{"role": "user", "content": "What is the capital of France?"}'
    body = f'{{"model": "{api.served_model_name}", "messages": [{message}], "max_tokens": 50, "temperature": 0}}'
    return (
        f"\nTriptych is ready after {seconds:.1f} s: {at}  model: {api.served_model_name}\n\n"
        f"  curl{options} {base}/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d '{body}'\n\n"
        "Ctrl-C ends it.\n"
    )


def _is_given(loaded: Loaded, name: str) -> bool:
    return name in loaded.given("api")


def _numbers(config: ServeConfig) -> list[int]:
    """The numbers of the API processes; one alone has none."""
    return list(range(1, config.api_processes + 1)) if config.api_processes > 1 else [0]


def _metrics_port(loaded: Loaded, role: str, number: int) -> int:
    """One for each process: API, scheduler and runner get the given port and the next two, other API processes those
    after, then other runners."""
    port: int = loaded.configs[role].metrics_port
    shared = len({config.metrics_port for table, config in loaded.configs.items() if table in ROLES}) == 1
    if not port:
        return 0
    others = number - 1 if role == "api" else number
    if others > 0:
        apis = loaded.get("serve", ServeConfig).api_processes - 1 if role == "runner" else 0
        return port + others + (len(ROLES) - 1 + apis if shared else 0)
    return port + tuple(reversed(ROLES)).index(role) if shared else port


class _Listening:
    """The HTTP socket and, if it has one, its file."""

    def __init__(self, listener: socket.socket, path: str) -> None:
        self._listener = listener
        self._path = path

    def close(self) -> None:
        """Close the one and remove the other. Idempotent."""
        self._listener.close()
        path, self._path = self._path, ""
        if path:
            Path(path).unlink(missing_ok=True)


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _write_line(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        pass  # the terminal is gone; serving goes on

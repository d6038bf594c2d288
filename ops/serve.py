"""`triptych serve`: what the supervisor runs, with which settings, and what a person is told when it is ready."""

from __future__ import annotations

import errno
import http.client
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ops.child import Program
from ops.config import Loaded
from ops.models import model_and_name
from ops.runtime_dir import RuntimeDir
from ops.serve_config import ServeConfig
from ops.supervisor import EXIT_FAILED, RestartPolicy, Supervisor
from ops.unix_http import UnixConnection
from protocol.settings import ENV_PREFIX, SettingError, specs, to_text
from services.config import ApiConfig

ROLES = ("runner", "scheduler", "api")
"""In start order; the API, which drains with the others' help, is stopped first."""

PROBE_TIMEOUT_S = 2.0


class PortInUse(OSError):
    """Somebody listens where the API should; found before any weights are loaded."""


def run(loaded: Loaded, environ: Mapping[str, str]) -> int:
    """Serve until a signal; the exit code."""
    config = loaded.get("serve", ServeConfig)
    api = loaded.get("api", ApiConfig)
    model, name = model_and_name(api.model, api.served_model_name if _is_given(loaded, "served_model_name") else "")
    try:
        api = replace(api, served_model_name=name, port=_claim_port(api))
    except PortInUse as error:
        print(f"triptych serve: {error}", file=sys.stderr)
        return EXIT_FAILED
    with RuntimeDir.use(config.runtime_dir) if config.runtime_dir else RuntimeDir.create(environ) as runtime:
        forced = {"runtime_dir": runtime.path, "model": str(model), "served_model_name": name, "port": api.port}
        supervisor = Supervisor(
            programs(loaded, forced, environ),
            write=_write_line,
            probe=lambda: is_ready(api),
            on_ready=lambda seconds: _write_line(banner(api, seconds)),
            policy=RestartPolicy(
                limit=config.restart_limit,
                backoff_s=config.restart_backoff_s,
                stable_after_s=config.restart_window_s,
                start_timeout_s=config.start_timeout_s,
            ),
            cleanup=runtime.close,
        )
        _write_line(f"starting runner, scheduler and API for {name} (sockets in {runtime.path})")
        return supervisor.run()


def programs(loaded: Loaded, forced: Mapping[str, Any], environ: Mapping[str, str]) -> list[Program]:
    """The three child processes. Their settings travel in the environment, which other users can't read."""
    config = loaded.get("serve", ServeConfig)
    api = loaded.get("api", ApiConfig)
    inherited = {name: value for name, value in environ.items() if not name.startswith(ENV_PREFIX)}
    found = []
    for role in ROLES:
        fields = specs(type(loaded.configs[role]))
        values = {**loaded.given(role), **{name: value for name, value in forced.items() if name in fields}}
        values = {**values, "metrics_port": _metrics_port(loaded, role)}
        settings = {fields[name].env: to_text(fields[name], value) for name, value in values.items()}
        found.append(
            Program(
                role=role,
                argv=[sys.executable, "-m", "ops.cli", role],
                env={**inherited, "PYTHONUNBUFFERED": "1", **settings},
                # The runner may still hold the session of the scheduler that died: the new one takes it over.
                restart_env={ENV_PREFIX + "TAKEOVER": "true"} if role == "scheduler" else {},
                stop_grace_s=config.stop_timeout_s + (api.shutdown_grace_s if role == "api" else 0.0),
            )
        )
    return found


def is_ready(api: ApiConfig) -> bool:
    """Whether `GET /ready` answers 200."""
    connection = (
        UnixConnection(api.uds, PROBE_TIMEOUT_S)
        if api.uds
        else http.client.HTTPConnection(_reachable(api.host), api.port, timeout=PROBE_TIMEOUT_S)
    )
    try:
        connection.request("GET", "/ready", headers={"Connection": "close"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False  # not listening yet, or not whole yet
    finally:
        connection.close()


def banner(api: ApiConfig, seconds: float) -> str:
    """What a person reads when all is ready: the address, the model id, and a command to paste."""
    base = "http://localhost" if api.uds else f"http://{_bracketed(_reachable(api.host))}:{api.port}"
    at = f"unix socket {api.uds}" if api.uds else base
    options = f" --unix-socket {api.uds}" if api.uds else ""
    if api.api_key or api.api_key_file:
        options += ' -H "Authorization: Bearer $API_KEY"'
    message = '{"role": "user", "content": "What is the capital of France?"}'
    body = f'{{"model": "{api.served_model_name}", "messages": [{message}]}}'
    return (
        f"\nTriptych is ready after {seconds:.1f} s: {at}  model: {api.served_model_name}\n\n"
        f"  curl{options} {base}/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d '{body}'\n\n"
        "Ctrl-C ends it.\n"
    )


def _is_given(loaded: Loaded, name: str) -> bool:
    return name in loaded.given("api")


def _metrics_port(loaded: Loaded, role: str) -> int:
    """Three processes can't share a TCP port: api, scheduler and runner get the given one and the next two."""
    port: int = loaded.configs[role].metrics_port
    shared = len({config.metrics_port for table, config in loaded.configs.items() if table in ROLES}) == 1
    return port + tuple(reversed(ROLES)).index(role) if port and shared else port


def _claim_port(api: ApiConfig) -> int:
    """The port to serve on (a free one for 0). PortInUse if it can't be bound."""
    if api.uds:
        return api.port
    family = socket.AF_INET6 if ":" in api.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((api.host, api.port))
        except socket.gaierror as error:
            raise SettingError(f"--host: got {api.host!r}: {error.strerror}") from None
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUse(
                    f"port {api.port} on {api.host} is in use by another process; end that one or choose another --port"
                ) from None
            raise PortInUse(f"can't listen on {api.host}:{api.port}: {os.strerror(error.errno or 0)}") from None
        return int(probe.getsockname()[1])


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _write_line(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        pass  # the terminal is gone; serving goes on

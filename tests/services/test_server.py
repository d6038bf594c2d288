"""Starting and stopping: draining, the grace, signals, addresses that are taken, wrong settings."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest

from protocol.messages import Limits
from protocol.settings import SettingError, specs
from services.config import ApiConfig
from services.listen import BindError, listen
from services.sampling import Defaults, load_defaults
from tests.harness import ROOT, free_port, request
from tests.services.fake_scheduler import FakeScheduler
from tests.services.service_kit import ANSWER, MODEL, MakeService, Service, payloads

WaitUntil = Callable[..., Any]
COMPLETIONS = "/v1/completions"


class Streaming:
    """A stream that is being read in a thread."""

    def __init__(self, service: Service, **fields: Any) -> None:
        self.text = ""
        self.begun = threading.Event()
        self._body = {"model": MODEL, "prompt": "x", "stream": True, **fields}
        self._address = service.address
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with httpx.stream("POST", self._address + COMPLETIONS, json=self._body, timeout=60) as response:
            for part in response.iter_text():
                self.text += part
                self.begun.set()

    def lines(self) -> list[str]:
        """All events, once the stream has ended."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        return payloads(self.text)


def test_a_stop_lets_running_streams_end_and_refuses_new_requests(
    make_service: MakeService, wait_until: WaitUntil
) -> None:
    service = make_service()
    scheduler = service.scheduler
    assert scheduler is not None
    scheduler.tokens_allowed = 2
    stream = Streaming(service)
    assert stream.begun.wait(60)
    service.request_stop()
    wait_until(lambda: service.state.draining, 60, "draining")
    refused = service.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "x"})
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down"
    assert service.http.get("/ready").status_code == 503
    assert service.http.get("/health").status_code == 200
    scheduler.call(lambda: setattr(scheduler, "tokens_allowed", 100))
    lines = stream.lines()
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == ANSWER
    assert lines[-1] == "[DONE]"
    assert service.join() == 0
    scheduler.wait_for(lambda: [g.code for g in scheduler.record.goodbyes] == ["shutdown"], "the goodbye")
    service.close()


def test_when_the_grace_is_over_streams_end_with_an_error_event(make_service: MakeService) -> None:
    service = make_service(shutdown_grace_s=0.3)
    scheduler = service.scheduler
    assert scheduler is not None
    scheduler.tokens_allowed = 2
    stream = Streaming(service)
    assert stream.begun.wait(60)
    service.request_stop()
    lines = stream.lines()
    assert json.loads(lines[-2])["error"]["code"] == "shutting_down"
    assert lines[-1] == "[DONE]"
    assert service.join() == 0
    service.close()


def test_an_address_in_use_is_an_error_that_names_it(smollm2: object, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BindError, match=f"port {port} on 127.0.0.1"):
            listen(ApiConfig(port=port))
    with pytest.raises(BindError, match="no.such.host"):
        listen(ApiConfig(host="no.such.host.invalid"))
    path = str(tmp_path / "http.sock")
    with listen(ApiConfig(uds=path)), pytest.raises(BindError, match="another live process"):
        listen(ApiConfig(uds=path))
    listen(ApiConfig(uds=path)).close()  # what a dead process left is swept
    (tmp_path / "file").write_text("x")
    with pytest.raises(BindError, match="not a socket"):
        listen(ApiConfig(uds=str(tmp_path / "file")))


def test_a_listening_socket_may_be_inherited_and_nothing_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as parent:
        address = parent.getsockname()
        with listen(ApiConfig(listen_fd=os.dup(parent.fileno()))) as listener:
            assert listener.getsockname() == address
    with socket.socket() as idle, pytest.raises(BindError, match="not a listening socket"):
        listen(ApiConfig(listen_fd=os.dup(idle.fileno())))
    with open(os.devnull) as file, pytest.raises(BindError, match="descriptor"):
        listen(ApiConfig(listen_fd=os.dup(file.fileno())))


def test_http_may_be_served_on_a_unix_socket(make_service: MakeService, tmp_path: Path) -> None:
    service = make_service(uds=str(tmp_path / "http.sock"))
    answer = service.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "x"}).json()
    assert answer["choices"][0]["text"] == ANSWER
    service.close()


@pytest.mark.parametrize(
    ("field", "value"), [("port", 70000), ("log_level", "loud"), ("engine_wait_s", -1.0), ("served_model_name", "")]
)
def test_a_wrong_setting_names_itself(field: str, value: Any) -> None:
    with pytest.raises(SettingError, match=field):
        ApiConfig(**{field: value})


def test_every_setting_has_help_and_keys_are_secret() -> None:
    for name, spec in specs(ApiConfig).items():
        assert len(spec.help) > 10, name
        assert spec.secret == (name in ("api_key", "admin_key"))


def test_sampling_defaults_come_from_the_model_unless_they_make_no_sense(tmp_path: Path) -> None:
    assert load_defaults(str(tmp_path)) == Defaults()
    path = tmp_path / "generation_config.json"
    path.write_text('{"temperature": 0.6, "top_p": 0.9, "top_k": 50, "repetition_penalty": "x", "min_p": null}')
    assert load_defaults(str(tmp_path)) == Defaults(temperature=0.6, top_p=0.9, top_k=50)
    path.write_text("{")
    assert load_defaults(str(tmp_path)) == Defaults()


def test_a_request_overrides_the_models_defaults(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    assert service.scheduler is not None
    monkeypatch.setattr(service.state, "defaults", Defaults(temperature=0.6, top_k=50))
    service.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "x"})
    service.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "x", "temperature": 1.5, "top_k": 7})
    params = [s.params for s in service.scheduler.record.submits]
    assert [(p.temperature, p.top_k) for p in params] == [(0.6, 50), (1.5, 7)]


class Process:
    """`services.main.run` in a process of its own."""

    def __init__(self, **settings: Any) -> None:
        code = "import json,sys; from services.config import ApiConfig; from services.main import run; "
        code += "c = json.loads(sys.argv[1]); "
        code += "sys.exit(run(ApiConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in c.items()})))"
        self.config = ApiConfig(**settings)
        self.popen = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(asdict(self.config))], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        self.address = f"http://127.0.0.1:{self.config.port}"

    def status(self, path: str) -> int:
        """The status of a GET, 0 if nobody listens."""
        try:
            return request(self.config.port, "GET", path).status
        except (OSError, http.client.HTTPException):
            return 0

    def end(self) -> tuple[int, str]:
        """The exit code and the log."""
        try:
            _, log = self.popen.communicate(timeout=200)
        finally:
            self.popen.kill()
        return self.popen.returncode, log


@pytest.fixture
def process(real_model_path: Path, runtime_dir: Path) -> Iterator[Process]:
    made = Process(model=str(real_model_path), runtime_dir=str(runtime_dir), port=free_port(), api_key=["sk-geheim"])
    yield made
    made.popen.kill()
    made.popen.wait()


def limits() -> Limits:
    return Limits(MODEL, 16, 65, 2048, 49152, 64, 512, (2,))


def test_a_process_ends_in_order_on_the_first_signal(process: Process, wait_until: WaitUntil) -> None:
    scheduler = FakeScheduler(process.config.scheduler_link, limits(), lambda submit: [5, 6])
    wait_until(lambda: process.status("/ready") == 200, 60, "readiness")
    assert Path(process.config.runtime_dir, "api.metrics.sock").exists()
    process.popen.send_signal(signal.SIGTERM)
    code, log = process.end()
    assert code == 0, log
    assert "sk-geheim" not in log
    scheduler.wait_for(lambda: len(scheduler.record.goodbyes) == 1, "the goodbye")
    scheduler.stop()
    assert not Path(process.config.runtime_dir, "api.metrics.sock").exists()


def test_a_second_signal_ends_a_draining_process_at_once(process: Process, wait_until: WaitUntil) -> None:
    scheduler = FakeScheduler(process.config.scheduler_link, limits(), lambda submit: [5, 6])
    scheduler.held = True
    wait_until(lambda: process.status("/ready") == 200, 60, "readiness")
    with httpx.stream(
        "POST",
        process.address + COMPLETIONS,
        json={"model": MODEL, "prompt": "x", "stream": True},
        headers={"Authorization": "Bearer sk-geheim"},
        timeout=200,
    ) as response:
        assert response.status_code == 200
        process.popen.send_signal(signal.SIGTERM)
        wait_until(lambda: process.status("/ready") == 503, 60, "draining")
        process.popen.send_signal(signal.SIGTERM)
        code, log = process.end()
    assert code == 130, log
    scheduler.stop()


def test_a_process_whose_scheduler_was_killed_still_ends(process: Process, wait_until: WaitUntil) -> None:
    scheduler = FakeScheduler(process.config.scheduler_link, limits(), lambda submit: [5, 6])
    wait_until(lambda: process.status("/ready") == 200, 60, "readiness")
    scheduler.stop()
    process.popen.send_signal(signal.SIGINT)
    code, log = process.end()
    assert code == 0, log


@pytest.mark.parametrize("wrong", ["model", "port", "keys", "address"])
def test_what_prevents_the_start_is_said_in_one_line(real_model_path: Path, runtime_dir: Path, wrong: str) -> None:
    settings: dict[str, Any] = {"model": str(real_model_path), "runtime_dir": str(runtime_dir), "port": free_port()}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings |= {
            "model": {"model": "/no/such/model.gguf"},
            "port": {"port": taken.getsockname()[1]},
            "keys": {"api_key_file": "/no/such/keys"},
            "address": {"scheduler_address": "ipc://relative"},
        }[wrong]
        code, log = Process(**settings).end()
    assert code == 1
    assert "can't start" in log.strip().splitlines()[-1]
    assert "Traceback" not in log
    assert not os.path.exists(f"{runtime_dir}/api.metrics.sock")


def test_a_request_that_waits_for_the_first_scheduler_ends_with_the_server(
    make_service: MakeService, wait_until: WaitUntil
) -> None:
    service = make_service(scheduler=False, shutdown_grace_s=0.1)
    outcome: list[int] = []

    def ask() -> None:
        outcome.append(service.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "x"}).status_code)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    wait_until(lambda: service.state.engine.chain._waiters, 60, "the request to wait")
    service.request_stop()
    thread.join(60)
    assert outcome == [503]
    assert service.join() == 0
    service.close()

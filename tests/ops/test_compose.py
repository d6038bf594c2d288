"""The Compose file and the images, read as data: what broken deployments in the field got wrong. Needs no Docker."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from ops.docker.requirements import requirements
from protocol.settings import specs
from runner.config import RunnerConfig
from scheduler.config import SchedulerConfig
from services.config import ApiConfig

ROOT = Path(__file__).parent.parent.parent
DOCKERFILES = [ROOT / "ops/docker/Dockerfile", ROOT / "ops/docker/Dockerfile.gpu"]
ROLES = {"api": ApiConfig, "scheduler": SchedulerConfig, "runner": RunnerConfig}
CONFIGS = {name: config for role, config in ROLES.items() for name, config in ((role, config), (f"{role}-gpu", config))}
RUNNERS = ("runner", "runner-gpu")


@cache
def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def service(name: str) -> dict[str, Any]:
    return compose()["services"][name]


def seconds(text: str) -> int:
    return int(re.fullmatch(r"(\d+)s", text)[1])


def test_there_is_no_top_level_key_that_one_generation_of_compose_refuses() -> None:
    assert {key for key in compose() if not key.startswith("x-")} == {"services", "networks", "volumes"}


def test_each_profile_has_one_service_per_process() -> None:
    assert set(compose()["services"]) == {*CONFIGS, "prometheus", "grafana"}
    for name in CONFIGS:
        assert service(name)["command"][0] == name.removesuffix("-gpu")
        assert service(name)["profiles"] == ["gpu" if name.endswith("-gpu") else "cpu"]
    assert service("grafana")["profiles"] == ["monitoring"]
    assert "profiles" not in service("prometheus")
    assert "COMPOSE_PROFILES=cpu\n" in (ROOT / ".env").read_text()


def test_only_the_gpu_runner_asks_for_a_gpu_and_in_the_form_that_every_compose_knows() -> None:
    assert [name for name in compose()["services"] if "deploy" in service(name)] == ["runner-gpu"]
    (device,) = service("runner-gpu")["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert not any("gpus" in service(name) or "runtime" in service(name) for name in compose()["services"])
    assert service("runner-gpu")["command"] == ["runner", "--device", "cuda"]
    assert service("runner")["command"] == ["runner", "--device", "cpu"]


def test_an_init_process_is_pid_1_and_no_shell_stands_between_it_and_the_server() -> None:
    for name in CONFIGS:
        assert service(name)["init"] is True
        assert service(name)["restart"] == "unless-stopped"
        assert "entrypoint" not in service(name)
    for dockerfile in DOCKERFILES:
        starts = re.findall(r"^(?:ENTRYPOINT|CMD) (.*)$", dockerfile.read_text(), re.M)
        assert starts
        assert all(start.startswith('["') for start in starts)


def test_health_checks_run_python_in_the_image_and_wait_for_a_long_start() -> None:
    for name in CONFIGS:
        health = service(name)["healthcheck"]
        assert health["test"][0] == "CMD"
        assert health["test"][1:] == ["python3", "-IS", "/opt/triptych/healthcheck.py", name.removesuffix("-gpu")]
        assert seconds(health["start_period"]) >= (600 if name in RUNNERS else 60)
    text = (ROOT / "docker-compose.yml").read_text() + "".join(path.read_text() for path in DOCKERFILES)
    assert not re.search(r"\b(curl|wget)\b", text)
    for dockerfile in DOCKERFILES:
        assert "COPY ops/docker/healthcheck.py /opt/triptych/healthcheck.py" in dockerfile.read_text()


@pytest.mark.parametrize("suffix", ["", "-gpu"])
def test_services_start_in_the_order_of_health_and_so_stop_in_the_reverse(suffix: str) -> None:
    healthy = {"condition": "service_healthy"}
    assert service(f"api{suffix}")["depends_on"] == {f"scheduler{suffix}": healthy}
    assert service(f"scheduler{suffix}")["depends_on"] == {f"runner{suffix}": healthy}
    assert "depends_on" not in service(f"runner{suffix}")


def test_no_service_depends_on_one_of_another_profile() -> None:
    # Compose calls the whole file invalid then.
    for name in compose()["services"]:
        for other in service(name).get("depends_on", {}):
            assert service(other).get("profiles", service(name).get("profiles")) == service(name).get("profiles")


def test_the_stop_grace_leaves_room_for_draining() -> None:
    drain = float(service("api")["environment"]["TRIPTYCH_SHUTDOWN_GRACE_S"])
    assert seconds(service("api")["stop_grace_period"]) >= drain + 10
    assert service("api-gpu")["stop_grace_period"] == service("api")["stop_grace_period"]
    assert all(seconds(service(name)["stop_grace_period"]) > 10 for name in CONFIGS)


def test_all_processes_share_one_private_network_and_only_http_is_published_on_loopback() -> None:
    assert list(compose()["networks"]) == ["triptych"]
    assert all(list(service(name)["networks"]) == ["triptych"] for name in compose()["services"])
    published = {name: service(name)["ports"] for name in compose()["services"] if "ports" in service(name)}
    http = ["${TRIPTYCH_PUBLISH:-127.0.0.1:8000}:8000"]
    assert published == {
        "api": http,
        "api-gpu": http,
        "grafana": ["127.0.0.1:3000:3000"],
    }
    assert service("api")["environment"]["TRIPTYCH_HOST"] == "0.0.0.0"


def test_sockets_models_and_compiled_kernels_lie_on_volumes() -> None:
    sockets = {name: "sockets:/run/triptych" in service(name)["volumes"] for name in CONFIGS}
    assert all(sockets.values())
    assert all(service(name)["environment"]["TRIPTYCH_RUNTIME_DIR"] == "/run/triptych" for name in CONFIGS)
    for name in ("api", "api-gpu", *RUNNERS):
        assert any(volume.endswith(":/models:ro") for volume in service(name)["volumes"])
    for name in RUNNERS:
        assert any(volume.endswith(":/var/cache/triptych") for volume in service(name)["volumes"])
        assert "shm_size" in service(name)
    named = {volume.split(":")[0] for s in compose()["services"].values() for volume in s["volumes"]}
    assert {name for name in named if name.isidentifier()} | {"models", "kernels-gpu"} == set(compose()["volumes"])


@pytest.mark.parametrize("name", CONFIGS)
def test_every_setting_in_a_services_environment_exists_and_accepts_its_value(name: str) -> None:
    known = {spec.env for config in CONFIGS.values() for spec in specs(config).values()}
    assert {key for key in service(name)["environment"] if key.startswith("TRIPTYCH_")} <= known
    own = {spec.env: spec.name for spec in specs(CONFIGS[name]).values()}
    assert own["TRIPTYCH_METRICS_PORT"] == "metrics_port"
    flags = {spec.flag for spec in specs(CONFIGS[name]).values()}
    assert {word for word in service(name)["command"] if word.startswith("--")} <= flags


def test_prometheus_scrapes_every_process_at_its_service_name_and_metrics_port() -> None:
    config = yaml.safe_load((ROOT / "ops/prometheus/prometheus.yml").read_text())
    targets = [t for job in config["scrape_configs"] for static in job["static_configs"] for t in static["targets"]]
    port = service("api")["environment"]["TRIPTYCH_METRICS_PORT"]
    assert targets == [f"{name}:{port}" for name in ("api", "scheduler", "runner")]
    for role in ROLES:
        assert service(f"{role}-gpu")["networks"]["triptych"]["aliases"] == [role]
    assert all(service(name)["environment"]["TRIPTYCH_METRICS_HOST"] == "0.0.0.0" for name in CONFIGS)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_images_take_their_base_as_an_argument_run_as_one_unprivileged_user_and_need_no_buildkit(
    dockerfile: Path,
) -> None:
    text = dockerfile.read_text()
    assert re.search(r"^ARG BASE_IMAGE=\S+\nFROM|^ARG BASE_IMAGE=\S+\n\nFROM", text, re.M)
    assert "useradd --uid 10001" in text
    assert not re.search(r"--mount=|<<|COPY --chmod", text)
    for stage in re.split(r"^FROM ", text, flags=re.M)[1:]:
        if "ENTRYPOINT" in stage:
            assert "\nUSER triptych\n" in stage


def test_the_light_image_holds_no_torch_and_the_gpu_image_the_pinned_flashinfer() -> None:
    pyproject = ROOT / "pyproject.toml"
    light = requirements(pyproject, [])
    assert not [r for r in light if re.match(r"torch|flashinfer|safetensors", r)]
    assert any(r.startswith("torch") for r in requirements(pyproject, ["cpu"]))
    assert {"flashinfer-python==0.6.14", "apache-tvm-ffi==0.1.15.post2"} <= set(requirements(pyproject, ["gpu"]))
    assert service("scheduler")["build"]["target"] == service("api")["build"]["target"] == "light"
    assert service("scheduler")["image"] == service("api")["image"]


def test_whatever_an_image_copies_is_sent_to_the_builder() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line[1:] for line in ignored if line.startswith("!")}
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests"}
    assert packages | {"pyproject.toml", "constraints.txt", "LICENSE", "README.md"} <= sent


@pytest.mark.parametrize("profiles", ["cpu", "gpu", "cpu,monitoring", "gpu,monitoring"])
def test_the_installed_compose_accepts_the_file(profiles: str) -> None:
    command = shutil.which("docker-compose")
    if command is None:
        pytest.skip("docker-compose is not installed")
    environment = {"PATH": os.environ["PATH"], "COMPOSE_PROFILES": profiles}
    done = subprocess.run(
        [command, "-f", str(ROOT / "docker-compose.yml"), "config", "--quiet"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr

"""That the project's files agree with each other: dependencies, pins, commands, environment names."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from ops.cli import CONFIG_CLASSES
from ops.config import RESERVED_ENV
from protocol.settings import specs

PACKAGES = ("protocol", "scheduler", "runner", "services", "ops")
# Import name → distribution, where they differ.
DISTRIBUTIONS = {
    "zmq": "pyzmq",
    "prometheus_client": "prometheus-client",
    "tvm_ffi": "apache-tvm-ffi",
    "flashinfer": "flashinfer-python",
}


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def requirements(*extras: str) -> dict[str, Requirement]:
    table = project()
    lines = [*table["dependencies"], *(line for extra in extras for line in table["optional-dependencies"][extra])]
    return {canonicalize_name(one.name): one for one in map(Requirement, lines)}


def pins() -> dict[str, Version]:
    found = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            found[canonicalize_name(name)] = Version(version)
    return found


def third_party(package: str) -> set[str]:
    """Distributions that a package's modules import."""
    names = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add((node.module or "").partition(".")[0])
    outside = names - set(sys.stdlib_module_names) - set(PACKAGES)
    return {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in outside}


def make(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run make as from a shell, also when the tests themselves run under make."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    return subprocess.run(["make", *arguments], cwd=cwd, capture_output=True, text=True, timeout=200, env=environment)


@pytest.mark.parametrize(
    ("package", "extras"),
    [
        ("protocol", ()),
        ("scheduler", ()),
        ("services", ()),
        ("ops", ("cpu", "gpu", "analysis")),
        ("runner", ("cpu", "gpu", "ray")),
    ],
)
def test_every_package_that_is_imported_is_declared(package: str, extras: tuple[str, ...]) -> None:
    assert third_party(package) - set(requirements(*extras)) == set()


def test_the_exact_versions_lie_in_the_declared_ranges() -> None:
    exact = pins()
    for name, requirement in requirements("cpu", "test").items():
        assert name in exact, f"{name} has no exact version in constraints.txt"
        assert requirement.specifier.contains(exact[name]), f"{requirement} excludes {exact[name]}"


def test_the_commands_entry_point_exists() -> None:
    module, _, name = project()["scripts"]["triptych"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_no_two_processes_give_one_setting_two_types() -> None:
    kinds: dict[str, tuple[type, bool]] = {}
    for module, name in CONFIG_CLASSES.values():
        for spec in specs(getattr(importlib.import_module(module), name)).values():
            assert kinds.setdefault(spec.name, (spec.kind, spec.optional)) == (spec.kind, spec.optional), spec.name
            assert spec.help


def test_every_variable_in_the_compose_file_means_something() -> None:
    known = set(RESERVED_ENV)
    for module, name in CONFIG_CLASSES.values():
        known |= {spec.env for spec in specs(getattr(importlib.import_module(module), name)).values()}
    used = set(re.findall(r"TRIPTYCH_[A-Z_]*[A-Z]", (ROOT / "docker-compose.yml").read_text()))
    assert used
    assert used - known == set()


def test_ci_runs_the_linters_and_the_tests() -> None:
    path = ROOT / ".ci" / "run"
    assert os.access(path, os.X_OK)
    steps = [line for line in path.read_text().splitlines() if line.startswith("make ")]
    assert steps == ["make lint", "make test"]


def test_make_says_so_when_there_is_no_python_that_fits(tmp_path: Path) -> None:
    copy = tmp_path / "Makefile"
    copy.write_bytes((ROOT / "Makefile").read_bytes())
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    done = make("serve", "PYTHON=", cwd=tmp_path)
    assert done.returncode != 0
    assert "Python 3.11, 3.12 or 3.13 is needed" in done.stderr


def test_a_second_make_serve_installs_nothing(tmp_path: Path) -> None:
    copy = tmp_path / "Makefile"
    copy.write_bytes((ROOT / "Makefile").read_bytes())
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    (tmp_path / ".venv").mkdir()
    for stamp in (".created", ".serve", ".kernels"):
        (tmp_path / ".venv" / stamp).touch()
    done = make("--dry-run", "serve", cwd=tmp_path)
    assert done.stdout.strip() == "exec .venv/bin/triptych serve"

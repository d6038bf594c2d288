"""Who may import whom, and what nobody may use. Read from the source, and tried in a process without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("protocol", "scheduler", "runner", "services", "ops")
STDLIB = frozenset(sys.stdlib_module_names)
FORBIDDEN_MODULES = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"})
FORBIDDEN_CALLS = frozenset({"recv_pyobj", "send_pyobj"})

# None: any third-party package. `ops` may import all of ours.
ALLOWED: dict[str, frozenset[str] | None] = {
    "protocol": frozenset({"protocol", "msgspec", "zmq", "numpy", "prometheus_client"}),
    "scheduler": frozenset({"scheduler", "protocol", "msgspec", "zmq", "numpy", "prometheus_client"}),
    "runner": None,
    "services": None,
}
OURS = {"runner": frozenset({"runner", "protocol"}), "services": frozenset({"services", "protocol"})}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, also those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield node.lineno, argument.value


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_package_imports_only_what_it_may(package: str) -> None:
    wrong = []
    for path in modules(package):
        for line, name in imports(ast.parse(path.read_text())):
            top = name.partition(".")[0]
            allowed = ALLOWED[package]
            fine = top in STDLIB or (top in allowed if allowed is not None else top not in PACKAGES)
            if not fine and top not in OURS.get(package, ()):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert modules(package)
    assert wrong == []


def test_nothing_can_unpickle() -> None:
    wrong = []
    for package in PACKAGES:
        for path in modules(package):
            tree = ast.parse(path.read_text())
            for line, name in imports(tree):
                if name.partition(".")[0] in FORBIDDEN_MODULES or name.startswith("multiprocessing"):
                    wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
            for node in ast.walk(tree):
                name = node.attr if isinstance(node, ast.Attribute) else ""
                if name in FORBIDDEN_CALLS or (name == "load" and ast.unparse(node) == "torch.load"):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} uses {ast.unparse(node)}")
                if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
                    wrong.append(f"{path.relative_to(ROOT)}:{node.value.lineno} allows pickle")
    assert wrong == []


def test_the_checks_find_what_they_look_for() -> None:
    tree = ast.parse(
        "def f():\n    import torch.nn\n    from pickle import loads\n    importlib.import_module('runner.main')"
    )
    assert sorted(imports(tree)) == [(2, "torch.nn"), (3, "pickle"), (4, "runner.main")]


@pytest.mark.parametrize("package", ["protocol", "scheduler", "services"])
def test_all_modules_import_where_torch_is_not_installed(package: str) -> None:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in modules(package)
    ]
    program = f"""
import importlib, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "flashinfer", "transformers", "safetensors"):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
for name in {names!r}:
    importlib.import_module(name)
assert "torch" not in sys.modules
print(len(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > len(names)

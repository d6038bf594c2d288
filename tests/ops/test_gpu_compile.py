"""Compiling FlashInfer's kernels ahead: what is looked for, what is built, and what is refused. Compiles nothing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ops.gpu import compile as gpu_compile
from ops.gpu.compile import CompileError, Wanted, check_size, find_toolkit, headers, stub_driver


def toolkit(folder: Path, *names: str) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "nvcc").touch(mode=0o755)
    (folder / "include").mkdir()
    for name in names:
        (folder / "include" / name).touch()
    return folder


def test_the_toolkit_that_is_named_is_taken(tmp_path: Path) -> None:
    named = toolkit(tmp_path / "named")
    other = toolkit(tmp_path / "other")
    assert find_toolkit({"CUDA_HOME": str(named), "PATH": str(other / "bin")}) == named


def test_a_compiler_in_the_path_leads_to_its_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_compile, "TOOLKITS", (str(tmp_path / "nowhere"),))
    found = toolkit(tmp_path / "cuda")
    assert find_toolkit({"PATH": str(found / "bin")}) == found


def test_without_a_toolkit_the_error_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_compile, "TOOLKITS", (str(tmp_path / "nowhere"),))
    with pytest.raises(CompileError, match=r"no nvcc in .*nowhere; set CUDA_HOME"):
        find_toolkit({"PATH": str(tmp_path)})
    with pytest.raises(CompileError, match=f"no nvcc in {tmp_path}"):
        find_toolkit({"CUDA_HOME": str(tmp_path)})


def test_headers_that_a_toolkit_has_are_left_to_it(tmp_path: Path) -> None:
    complete = toolkit(tmp_path / "complete", "curand_kernel.h", "cublasLt.h", "cublas_v2.h")
    assert headers(complete, tmp_path / "extra") == [] and not (tmp_path / "extra").exists()
    some = toolkit(tmp_path / "some", "curand_kernel.h", "cublas_v2.h")
    (empty,) = headers(some, tmp_path / "extra")
    assert [(file.name, file.stat().st_size) for file in empty.iterdir()] == [("cublasLt.h", 0)]


def test_curand_comes_from_its_package_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def install(command: list[str], check: bool) -> None:
        calls.append(command)
        place = Path(command[command.index("--target") + 1]) / "nvidia/cu13/include"
        place.mkdir(parents=True)
        (place / "curand_kernel.h").touch()

    monkeypatch.setattr(subprocess, "run", install)
    bare = toolkit(tmp_path / "bare", "cublasLt.h", "cublas_v2.h")
    assert headers(bare, tmp_path / "extra") == headers(bare, tmp_path / "extra")
    assert len(calls) == 1 and calls[0][-1] == "nvidia-curand==10.4.0.35" and "--no-deps" in calls[0]


def test_a_driver_to_link_to_is_made(tmp_path: Path) -> None:
    folder = stub_driver(tmp_path / "driver")
    assert stub_driver(folder) == folder
    assert (folder / "libcuda.so.1").stat().st_size > 0 and (folder / "libcuda.so").resolve().name == "libcuda.so.1"


class Spec:
    """A module as FlashInfer describes it; building writes so many bytes, or fails."""

    def __init__(self, folder: Path, name: str, size: int = 10, fault: str = "") -> None:
        self.name, self.size, self.fault, self.builds = name, size, fault, 0
        self.jit_library_path = folder / f"{name}.so"

    def build(self, verbose: bool) -> None:
        self.builds += 1
        if self.fault:
            raise RuntimeError(self.fault)
        self.jit_library_path.write_bytes(b"x" * self.size)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(specs: list[Spec], version: str = gpu_compile.VERSION) -> None:
        monkeypatch.setitem(sys.modules, "flashinfer", type("flashinfer", (), {"__version__": version}))
        monkeypatch.setattr(gpu_compile, "specs", lambda wanted: iter(specs))

    return use


def test_modules_are_gathered_where_flashinfer_looks_for_them(tmp_path: Path, pretend: Any) -> None:
    specs = [Spec(tmp_path, "page"), Spec(tmp_path, "norm")]
    pretend(specs)
    package = gpu_compile.build(tmp_path, Wanted((64,), ()))
    spec = importlib.util.spec_from_file_location("made", package / "__init__.py")
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert made.__version__ == gpu_compile.VERSION and made.get_jit_cache_dir() == str(package)
    assert sorted(file.relative_to(package).as_posix() for file in package.rglob("*.so")) == [
        "norm/norm.so",
        "page/page.so",
    ]
    gpu_compile.build(tmp_path, Wanted((64,), ()))
    assert [spec.builds for spec in specs] == [1, 1], "what is there isn't built again"


def test_a_module_that_fails_is_named_and_leaves_nothing(tmp_path: Path, pretend: Any) -> None:
    pretend([Spec(tmp_path, "page", fault="nvcc died")])
    with pytest.raises(CompileError, match="page: nvcc died"):
        gpu_compile.build(tmp_path, Wanted((64,), ()))
    assert not list(tmp_path.rglob("page.so"))


def test_a_package_too_large_to_carry_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_compile, "LARGEST", 100)
    (tmp_path / "a.so").write_bytes(b"x" * 60)
    assert check_size(tmp_path) == 60
    (tmp_path / "b.so").write_bytes(b"x" * 60)
    with pytest.raises(CompileError, match="weighs"):
        check_size(tmp_path)


def test_another_release_is_refused(tmp_path: Path, pretend: Any) -> None:
    pretend([], version="0.7.0")
    with pytest.raises(CompileError, match=r"0\.7\.0 is installed, this needs 0\.6\.14"):
        gpu_compile.build(tmp_path, Wanted((64,), ()))


def test_the_modules_are_those_that_the_runner_loads(tmp_path: Path) -> None:
    """From FlashInfer itself, in a process of its own: its settings are read when it is imported."""
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("flashinfer is not installed")
    program = (
        "from ops.gpu.compile import Wanted, specs\n"
        "names = [spec.name for spec in specs(Wanted((64, 128), (('bfloat16', 'bfloat16'),)))]\n"
        "print(' '.join(names))\n"
    )
    environment = {
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
        "PATH": "/usr/bin:/bin",
    }
    environment |= {"CUDA_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    names = done.stdout.split("\n")[-2].split()
    assert names[:5] == ["page", "silu_and_mul", "norm", "rope", "sampling"] and len(names) == 9
    attention = [(name.split("_with")[0], "head_dim_qk_64" in name, "kv_bf16" in name) for name in names[5:]]
    assert attention == [(kind, small, True) for small in (True, False) for kind in ("batch_decode", "batch_prefill")]


def test_the_command_fails_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert gpu_compile.main(["--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == f"gpu-compile: no nvcc in {tmp_path}; set CUDA_HOME to a CUDA 13 toolkit\n"

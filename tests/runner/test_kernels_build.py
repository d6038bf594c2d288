"""Building and choosing kernels: the cache, two builders at once, one OpenMP runtime, the reasons to do without."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from runner.attention.cpu import CpuAttention
from runner.attention.torch_paged import TorchAttention
from runner.kernels import build
from runner.kernels.build import KernelError
from runner.kernels.native import NativeOps
from runner.kernels.select import select_attention, select_ops
from runner.ops import TorchOps

ROOT = Path(build.__file__).parents[2]


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.load.cache_clear()
    yield tmp_path / "triptych" / "kernels"
    build.load.cache_clear()


@pytest.fixture
def no_compiler(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")


def pools(dtype: torch.dtype = torch.float32, head_dim: int = 32) -> list[torch.Tensor]:
    return [torch.zeros(2, 2, 4, 1, head_dim, dtype=dtype)]


def test_two_processes_that_build_at_once_end_with_one_library(fresh_cache: Path) -> None:
    program = (
        "from runner.kernels import build\n"
        "build.FLAGS = tuple('-O0' if flag == '-O3' else flag for flag in build.FLAGS)\n"  # quicker, and as good here
        "raise SystemExit(build.main())\n"
    )
    command = [sys.executable, "-c", program]
    builders = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = {builder.communicate(timeout=280)[0].strip() for builder in builders}
    assert [builder.returncode for builder in builders] == [0, 0]
    assert [str(path) for path in fresh_cache.iterdir()] == list(printed), "one library, and nothing left lying about"


def test_the_library_is_found_again_and_not_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    path = build.build()
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled what was there"))
    assert build.build() == path


def test_another_compiler_torch_or_cpu_is_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = build.find_compiler()
    keys = {build.build_key(compiler)}
    monkeypatch.setattr(build, "_cpu_flags", lambda: "x86_64 another model sse2")
    keys.add(build.build_key(compiler))
    monkeypatch.setattr(torch, "__version__", "2.12.0")
    keys.add(build.build_key(compiler))
    assert len(keys) == 3


def test_a_process_that_computes_with_torch_and_kernels_has_one_openmp_runtime() -> None:
    program = (
        "import torch\n"
        "from runner.kernels.native import NativeOps\n"
        "ops, x = NativeOps(torch.float32), torch.ones(64, 512)\n"
        "ops.linear(x, ops.pack_linear(torch.ones(512, 512))) @ torch.ones(512, 512)\n"
        "maps = open('/proc/self/maps').read().split('\\n')\n"
        "print({line.split()[-1] for line in maps if 'libgomp' in line or 'libiomp' in line or 'libomp' in line})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    runtimes = eval(done.stdout)
    assert runtimes == {str(build.find_openmp())}


def test_a_cache_that_others_can_write_to_is_refused(fresh_cache: Path) -> None:
    fresh_cache.mkdir(parents=True)
    fresh_cache.chmod(0o777)
    with pytest.raises(KernelError, match="writable by another user"):
        build.build()


def test_a_failing_compiler_is_quoted(fresh_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "broken-c++"
    compiler.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'out of cheese' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(KernelError, match="exit code 3: out of cheese"):
        build.build()
    assert list(fresh_cache.iterdir()) == []


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names x86-64 instruction sets")
@pytest.mark.parametrize("target", ["-march=x86-64-v3", "-march=x86-64"])
def test_the_same_source_is_right_without_avx512(fresh_cache: Path, tmp_path: Path, target: str) -> None:
    """Runs some of the kernels' own tests in a process that was compiled for an older CPU."""
    program = (
        "import sys, torch\n"
        "from runner.kernels import build\n"
        "build.FLAGS = tuple(sys.argv[1] if flag == '-march=native' else flag for flag in build.FLAGS)\n"
        "import pytest\n"
        "chosen = ['-k', '(gated or same_bits or mix_in_one_step) and not reference', '-p', 'no:cacheprovider', '-q']\n"
        "sys.exit(pytest.main([*chosen, 'tests/runner/test_ops.py', 'tests/runner/test_attention_paged.py']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, target], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_native_is_taken_where_it_works(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert isinstance(select_ops(torch.bfloat16), NativeOps)
    assert isinstance(select_attention(pools(), 3, 1, 32, 1.0), CpuAttention)
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]


def test_torch_is_taken_when_asked_for() -> None:
    assert isinstance(select_ops(torch.bfloat16, choice="torch"), TorchOps)
    assert isinstance(select_attention(pools(), 3, 1, 32, 1.0, choice="torch"), TorchAttention)


def test_without_a_compiler_torch_serves_and_the_log_says_why(
    no_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(select_ops(torch.float32), TorchOps)
    assert isinstance(select_attention(pools(), 3, 1, 32, 1.0), TorchAttention)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert all("'no-such-compiler' is not on the PATH" in record.getMessage() for record in caplog.records)


def test_without_a_compiler_insisting_on_native_is_an_error(no_compiler: None) -> None:
    with pytest.raises(KernelError, match="no C"):
        select_ops(torch.float32, choice="native")
    with pytest.raises(KernelError, match="no C"):
        select_attention(pools(), 3, 1, 32, 1.0, choice="native")


def test_what_there_are_no_kernels_for_goes_to_torch(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(select_ops(torch.float16), TorchOps)
    assert isinstance(select_ops(torch.bfloat16, "meta"), TorchOps)
    assert isinstance(select_attention(pools(head_dim=24), 3, 1, 24, 1.0), TorchAttention)
    assert "torch.float16 on cpu" in caplog.messages[0]
    assert "not 24" in caplog.messages[2]


def test_the_build_command_says_what_is_wrong(no_compiler: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main() == 1
    assert "no C++ compiler" in capsys.readouterr().err

"""`make gpu-compile`: FlashInfer's kernels for one GPU architecture, compiled on a machine that needs no GPU.

The result is a small package `flashinfer_jit_cache`. With its parent folder in PYTHONPATH and FLASHINFER_DISABLE_JIT=1
FlashInfer loads these modules and compiles nothing. Only what the runner calls is built; what is already built is kept.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = "0.6.14"
"""Of flashinfer-python: the URIs and signatures of compiled modules belong to one release."""
ARCH = "9.0a"
LARGEST = 64 << 20
"""Bytes that the package may weigh: it is carried to machines without a network."""
CURAND = "nvidia-curand==10.4.0.35"
"""Headers that the sampling kernels include and a toolkit without its libraries lacks."""
TOOLKITS = ("/usr/local/cuda-13.0", "/usr/local/cuda")
PACKAGE = "flashinfer_jit_cache"
INIT = f'''"""FlashInfer's kernels, compiled ahead for sm_{ARCH.replace(".", "")}."""

import os

__version__ = "{VERSION}"


def get_jit_cache_dir() -> str:
    return os.path.dirname(os.path.abspath(__file__))
'''


class CompileError(Exception):
    """Kernels that can't be compiled here; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Attention kernels to build: every head_dim with every (query, key/value) pair of dtypes."""

    head_dims: tuple[int, ...]
    dtypes: tuple[tuple[str, str], ...]


def find_toolkit(environment: dict[str, str]) -> Path:
    """The CUDA toolkit: CUDA_HOME, the usual places, or where nvcc in PATH is. CompileError if there is none."""
    named = environment.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=environment.get("PATH"))
    found = [Path(named)] if named else [Path(place) for place in TOOLKITS]
    if nvcc and not named:
        found.append(Path(nvcc).resolve().parent.parent)
    for place in found:
        if (place / "bin" / "nvcc").is_file():
            return place
    raise CompileError(f"no nvcc in {', '.join(map(str, found))}; set CUDA_HOME to a CUDA 13 toolkit")


def stub_driver(folder: Path) -> Path:
    """A folder with an empty libcuda: modules link to the driver's library, which only a machine with a GPU has."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libcuda.so.1"
    if not library.is_file():
        subprocess.run(["gcc", "-shared", "-x", "c", os.devnull, "-o", str(library)], check=True)
    link = folder / "libcuda.so"
    if not link.is_symlink():
        link.symlink_to(library.name)
    return folder


def headers(toolkit: Path, folder: Path) -> list[Path]:
    """Folders of headers that FlashInfer's sources include and this toolkit lacks.

    curand's come from its package on PyPI; of cuBLAS the norm module only includes the names, so empty ones do.
    """
    extra: list[Path] = []
    include = toolkit / "include"
    if not (include / "curand_kernel.h").is_file():
        unpacked = folder / "curand"
        if not any(unpacked.rglob("curand_kernel.h")):
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(unpacked), CURAND]
            subprocess.run(pip, check=True)
        extra.append(next(unpacked.rglob("curand_kernel.h")).parent)
    missing = [name for name in ("cublasLt.h", "cublas_v2.h") if not (include / name).is_file()]
    if missing:
        empty = folder / "empty"
        empty.mkdir(parents=True, exist_ok=True)
        for name in missing:
            (empty / name).touch()
        extra.append(empty)
    return extra


def settings(toolkit: Path, folder: Path, jobs: int) -> dict[str, str]:
    """The environment that FlashInfer's build reads; it must be set before flashinfer is imported."""
    includes = headers(toolkit, folder / "headers")
    return {
        "CUDA_HOME": str(toolkit),
        "FLASHINFER_CUDA_ARCH_LIST": ARCH,
        "FLASHINFER_WORKSPACE_BASE": str(folder / "work"),
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{stub_driver(folder / 'driver')}",
        "FLASHINFER_EXTRA_CUDAFLAGS": " ".join(f"-I{place}" for place in includes),
        "FLASHINFER_USE_CUDA_NORM": "1",
        "MAX_JOBS": str(jobs),
    }


def specs(wanted: Wanted) -> Iterator[Any]:
    """FlashInfer's build descriptions of the modules that the runner loads."""
    import torch

    jit = {name: importlib.import_module(f"flashinfer.jit.{name}") for name in ("page", "norm", "rope", "sampling")}
    yield jit["page"].gen_page_module()
    yield importlib.import_module("flashinfer.jit.activation").gen_act_and_mul_module("silu")
    yield jit["norm"].gen_norm_module()
    yield jit["rope"].gen_rope_module()
    yield jit["sampling"].gen_sampling_module()
    attention = importlib.import_module("flashinfer.jit.attention")
    for head_dim in wanted.head_dims:
        for query, keys in wanted.dtypes:
            q, kv = getattr(torch, query), getattr(torch, keys)
            plain = (q, kv, q, torch.int32, head_dim, head_dim, 0, False, False)
            yield attention.gen_batch_decode_module(*plain)
            yield attention.gen_batch_prefill_module("fa2", *plain, False)


def build(folder: Path, wanted: Wanted, *, verbose: bool = False) -> Path:
    """Compile what is missing and gather the package below `folder`; its path. CompileError says what failed."""
    import flashinfer

    if flashinfer.__version__ != VERSION:
        raise CompileError(f"flashinfer {flashinfer.__version__} is installed, this needs {VERSION}")
    package = folder / "package" / PACKAGE
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(INIT)
    modules = list(specs(wanted))
    for number, spec in enumerate(modules, 1):
        target = package / spec.name / f"{spec.name}.so"
        if not target.is_file():
            began = time.monotonic()
            print(f"[{number}/{len(modules)}] {spec.name}", flush=True)
            try:
                spec.build(verbose)
            except RuntimeError as error:
                raise CompileError(f"{spec.name}: {error}") from error
            _take(spec.jit_library_path, target)
            print(f"    {time.monotonic() - began:.0f} s, {target.stat().st_size / 2**20:.1f} MiB", flush=True)
    check_size(package)
    return package


def _take(library: Path, target: Path) -> None:
    """Copy, then rename: an interrupted run must not leave half a module that looks built."""
    target.parent.mkdir(exist_ok=True)
    partial = target.with_suffix(".part")
    shutil.copyfile(library, partial)
    partial.replace(target)


def check_size(package: Path) -> int:
    """Bytes of the package. CompileError if that is more than can be carried."""
    size = sum(file.stat().st_size for file in package.rglob("*.so"))
    if size > LARGEST:
        raise CompileError(f"{package} weighs {size / 2**20:.1f} MiB, more than {LARGEST / 2**20:.0f}")
    return size


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, build, say where the package is; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ops.gpu.compile", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/flashinfer"), help="folder for everything")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"], choices=["bfloat16", "float16"])
    parser.add_argument("--fp8-kv", action="store_true", help="also kernels over float8_e4m3fn pages")
    parser.add_argument("--jobs", type=int, default=1, help="compilers at a time; each takes up to 4 GiB")
    parser.add_argument("--verbose", action="store_true", help="show the compilers' output")
    options = parser.parse_args(arguments)
    folder = options.out.resolve()
    pairs = [(dtype, dtype) for dtype in options.dtypes]
    if options.fp8_kv:
        pairs += [(dtype, "float8_e4m3fn") for dtype in options.dtypes]
    try:
        os.environ.update(settings(find_toolkit(dict(os.environ)), folder, options.jobs))
        package = build(folder, Wanted(tuple(options.head_dims), tuple(pairs)), verbose=options.verbose)
    except (CompileError, ImportError, subprocess.CalledProcessError) as error:
        print(f"gpu-compile: {error}", file=sys.stderr)
        return 1
    print(f"{package}: {check_size(package) / 2**20:.1f} MiB. On the GPU machine:")
    print(f"    export PYTHONPATH={package.parent}:$PYTHONPATH FLASHINFER_DISABLE_JIT=1")
    return 0


if __name__ == "__main__":
    sys.exit(main())

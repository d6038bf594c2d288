"""Compiles the C++ kernels once per machine into the user's cache, and loads them. The source tree is left alone.

The library links against the OpenMP runtime that torch brings: a second one would have its own threads, and the two
would spin against each other for the same cores. Run `python -m runner.kernels.build` to compile ahead of time.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

SOURCE_DIR = Path(__file__).parent / "src"
FLAGS = ("-std=gnu++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC")
BUILD_TIMEOUT_S = 300.0
SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""What the names of a dtype's kernels end in."""


class KernelError(Exception):
    """The kernels can't be built or loaded here; the message says why, for the log."""


def cache_dir() -> Path:
    """Where compiled kernels live: $XDG_CACHE_HOME/triptych/kernels."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "triptych" / "kernels"


def sources() -> list[Path]:
    """The C++ files, in a stable order."""
    return sorted(SOURCE_DIR.glob("*.cpp"))


def find_compiler() -> str:
    """Path of the C++ compiler: $CXX, or g++. Raises KernelError if there is none."""
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        raise KernelError(f"no C++ compiler: {name!r} is not on the PATH")
    return path


def find_openmp() -> Path | None:
    """The libgomp that torch was shipped with, or None if torch brings another OpenMP runtime."""
    package = Path(torch.__file__).parent
    for directory in (package / "lib", package.parent / "torch.libs"):
        for path in sorted(directory.glob("libgomp*.so*")):
            return path
    return None


def _cpu_flags() -> str:
    """What `-march=native` depends on: the architecture and its instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    model = next((line for line in lines if line.startswith("model name")), "")
    return f"{platform.machine()} {model} {flags}"


def build_key(compiler: str) -> str:
    """Name of the build that this source, compiler, CPU and torch need."""
    version = _run([compiler, "--version"]).partition("\n")[0]
    digest = hashlib.blake2b(digest_size=12)
    for part in (version, " ".join(FLAGS), _cpu_flags(), torch.__version__, str(find_openmp())):
        digest.update(part.encode() + b"\0")
    for path in sorted(SOURCE_DIR.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def build() -> Path:
    """Path of the compiled library, compiling it if the cache hasn't got it. Raises KernelError.

    Two processes may do this at once: each compiles to its own file and renames it into place.
    """
    compiler = find_compiler()
    directory = cache_dir()
    target = directory / f"triptych_kernels_{build_key(compiler)}.so"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(directory)
        if target.exists():
            return target
        with tempfile.TemporaryDirectory(dir=directory, prefix="build-") as scratch:
            built = _compile(compiler, Path(scratch))
            os.replace(built, target)
    except OSError as error:
        raise KernelError(f"can't use the kernel cache {directory}: {error}") from error
    return target


def _check_private(directory: Path) -> None:
    # What lies here is loaded as code: nobody else may be able to put it there.
    status = directory.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KernelError(f"{directory} belongs to or is writable by another user")


def _compile(compiler: str, scratch: Path) -> Path:
    objects = {str(source): str(scratch / f"{source.stem}.o") for source in sources()}
    commands = [[compiler, *FLAGS, "-c", source, "-o", target] for source, target in objects.items()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, commands))
    built = scratch / "kernels.so"
    openmp = find_openmp()
    # Without -fopenmp here, so that the linker doesn't add the compiler's own libgomp.
    _run([compiler, "-shared", "-o", str(built), *objects.values(), *([str(openmp)] if openmp else [])])
    return built


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelError(f"{command[0]} failed: {error}") from error
    if done.returncode:
        raise KernelError(f"{' '.join(command)} failed with exit code {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_PACK = [_POINTER, _POINTER, _INT, _INT, _INT]
_LINEAR = [_POINTER, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _INT, _INT, _INT, _INT]
_SIGNATURES = {
    "rms_norm": [_POINTER, _LONG, _POINTER, _POINTER, _LONG, _INT, _INT, _FLOAT],
    "silu_and_mul": [_POINTER, _POINTER, _INT, _INT],
    "rope": [_POINTER, _LONG, _INT, _POINTER, _LONG, _INT, _INT, _POINTER, _POINTER, _INT, _INT],
    "head_norm": [_POINTER, _LONG, _INT, _INT, _POINTER, _INT, _FLOAT],
    "attention": [_POINTER, _INT, _INT, _INT, _INT, _FLOAT] + [_POINTER, _LONG] * 3 + [_POINTER, _POINTER],
    "layers": [_POINTER] * 6,
    "pack": _PACK,
    "linear": _LINEAR,
}


@functools.cache
def load() -> ctypes.CDLL:
    """The kernels, built if need be, with their argument types declared. Raises KernelError."""
    path = build()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelError(f"can't load {path}: {error}") from error
    for name, arguments in _SIGNATURES.items():
        for dtype in SUFFIX.values():
            _declare(library, f"triptych_{name}_{dtype}", arguments)
    _declare(library, "triptych_linear_bf16_f32", _LINEAR)
    return library


def _declare(library: ctypes.CDLL, name: str, arguments: list[type]) -> None:
    function = getattr(library, name)
    function.argtypes = arguments
    function.restype = None


def main() -> int:
    """Compile and load; print where the library is. Exit code 1, with the reason, if that can't be done."""
    try:
        load()
        print(build())
    except KernelError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

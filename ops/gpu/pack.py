"""`make gpu-pack`: what a machine with a GPU and torch, but without a network, lacks to run `python -m ops.gpu_check`.

Packages for its Python, FlashInfer without the sources that it would compile, the kernels that `make gpu-compile` made,
and a real model's first layers with what the CPU says of them. All of it, with this tree, weighs less than 64 MiB.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ops.gpu.unpack import EXPECTED, JIT_CACHE, MODEL, PACKAGES

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
CARRIED = 64 * MIB
"""Bytes that may travel in all: the files of this tree that git doesn't ignore, and the pack."""
PYTHON, PLATFORMS = "3.12", ("2_28", "2_27", "2_26", "2_24", "2_17")
FLASHINFER = "flashinfer-python"
MISSING = (FLASHINFER, "apache-tvm-ffi", "pyzmq", "msgspec", "gguf", "torchao")
"""What the machine's image lacks of all that a runner and a scheduler import, in the versions of constraints.txt."""
DROPPED = {
    FLASHINFER: tuple(f"flashinfer/data/{name}/" for name in ("cutlass", "cccl", "include", "spdlog")),
    "apache-tvm-ffi": ("tvm_ffi/3rdparty/", "tvm_ffi/include/", "tvm_ffi/src/"),
    "torchao": ("torchao/_C_",),
}
"""Prefixes of files that nothing reads where nothing is compiled, and of torchao's kernels for other schemes."""
FLASHINFER_SOURCES = "flashinfer/data/csrc/"
"""Of these the files at the top stay: templates are filled in before a compiled module is looked for."""


class PackError(Exception):
    """A pack that can't be made; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Part:
    """A file of the pack. `limit`: what it may weigh, in bytes."""

    name: str
    bytes: int
    limit: int


LIMITS = {
    FLASHINFER: int(2.6 * MIB),
    "apache-tvm-ffi": int(2.4 * MIB),
    "pyzmq": int(0.9 * MIB),
    "msgspec": int(0.3 * MIB),
    "gguf": int(0.2 * MIB),
    "torchao": int(1.5 * MIB),
    JIT_CACHE: int(12.5 * MIB),
    MODEL: int(34.1 * MIB),
    EXPECTED: 1 * MIB,
}
"""Each part's share, in bytes. What CARRIED leaves beside them is the tree's."""
TREE = CARRIED - sum(LIMITS.values())


def pinned(names: Sequence[str], constraints: str) -> list[str]:
    """`name==version` of each, from the text of a constraints file. PackError if one isn't there."""
    versions = dict(line.split("==", 1) for line in constraints.splitlines() if "==" in line and line[0] != "#")
    if lost := [name for name in names if name not in versions]:
        raise PackError(f"constraints.txt pins no version of {', '.join(lost)}")
    return [f"{name}=={versions[name]}" for name in names]


def download(requirements: Sequence[str], folder: Path) -> None:
    """Wheels for the other machine's Python into `folder`, without what they require."""
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    words += ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", "--dest", str(folder)]
    for platform in PLATFORMS:
        words += ["--platform", f"manylinux_{platform}_x86_64"]
    if subprocess.run([*words, *requirements], check=False).returncode:
        raise PackError(f"pip can't download {' '.join(requirements)}")


def kept(package: str, name: str) -> bool:
    """Whether a file of a package's wheel travels."""
    if name.startswith(DROPPED.get(package, ())):
        return False
    inside = name.removeprefix(FLASHINFER_SOURCES)
    return package != FLASHINFER or inside == name or "/" not in inside


def repack(wheel: Path, package: str, target: Path) -> None:
    """Write the files of a wheel that travel to `target`, compressed as far as it goes.

    PackError if one of its libraries names another that stays behind: it would not load.
    """
    with zipfile.ZipFile(wheel) as source, _archive(target) as out:
        names = sorted(name for name in source.namelist() if not name.endswith("/"))
        dropped = [name.rsplit("/", 1)[-1] for name in names if name.endswith(".so") and not kept(package, name)]
        for name in (name for name in names if kept(package, name)):
            data = source.read(name)
            if name.endswith(".so") and (needed := [other for other in dropped if other.encode() in data]):
                raise PackError(f"{package}: {name} needs {', '.join(needed)}")
            out.writestr(name, data)


def pack_kernels(compiled: Path, target: Path) -> list[str]:
    """The compiled modules at `compiled` (…/flashinfer_jit_cache) to `target`; their names. PackError if none."""
    modules = sorted(compiled.glob("*/*.so"))
    if not modules:
        raise PackError(f"no compiled kernels in {compiled}: run make gpu-compile first, or pass --without-kernels")
    with _archive(target) as out:
        for file in (compiled / "__init__.py", *modules):
            out.write(file, f"{JIT_CACHE}/{file.relative_to(compiled)}")
    return [module.stem for module in modules]


def _archive(target: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9)


def parts(folder: Path) -> list[Part]:
    """The files of a pack with their shares. PackError for a file that has none."""
    found = []
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        share = next((name for name in LIMITS if file.name.startswith(name)), None)
        if share is None:
            raise PackError(f"{file} is no part of the pack: remove it")
        found.append(Part(file.name, file.stat().st_size, LIMITS[share]))
    return found


def check_budget(found: Sequence[Part], tree_bytes: int) -> None:
    """PackError if a part exceeds its share, or the tree what is left."""
    for part in (*found, Part("the tree", tree_bytes, TREE)):
        if part.bytes > part.limit:
            raise PackError(f"{part.name} weighs {part.bytes / MIB:.1f} MiB, its share is {part.limit / MIB:.1f}")


def tree_bytes(root: Path) -> int:
    """Bytes of the files that git doesn't ignore."""
    words = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split("\0")
    return sum((root / name).stat().st_size for name in names if name and (root / name).is_file())


def make_model(source: Path, folder: Path, say: Callable[[str], None]) -> None:
    """The truncated model and what the CPU says of it."""
    from ops.gpu import truncated

    say(f"the first {truncated.LAYERS} layers of {source.name}")
    truncated.truncate(source, folder / MODEL)
    say("what the CPU says of them, in float32 and bfloat16 (a minute)")
    truncated.save(folder / EXPECTED, list(truncated.expectations(folder / MODEL, truncated.prompts(source))))


def make(folder: Path, compiled: Path | None, source: Path, say: Callable[[str], None]) -> list[Part]:
    """The whole pack at `folder`, anew; `compiled` None leaves the kernels out. PackError says what went wrong."""
    shutil.rmtree(folder, ignore_errors=True)
    packages, wheels = folder / PACKAGES, folder / "wheels"
    packages.mkdir(parents=True)
    if compiled is not None:
        pack_kernels(compiled, packages / f"{JIT_CACHE}.zip")
    say(f"packages for Python {PYTHON}")
    download(pinned(MISSING, (ROOT / "constraints.txt").read_text()), wheels)
    for package in MISSING:
        (wheel,) = wheels.glob(f"{package.replace('-', '_')}-*.whl")
        repack(wheel, package, packages / f"{package}.zip")
    shutil.rmtree(wheels)
    make_model(source, folder, say)
    found = parts(folder)
    check_budget(found, tree_bytes(ROOT))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the pack, list its parts; the exit code."""
    from ops.models import DEFAULT_MODEL, resolve_model

    parser = argparse.ArgumentParser(prog="python -m ops.gpu.pack", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="where it is made, anew")
    kernels = ROOT / "build" / "flashinfer" / "package" / JIT_CACHE
    parser.add_argument("--kernels", type=Path, default=kernels, help="what `make gpu-compile` made")
    parser.add_argument("--without-kernels", action="store_true", help="for a machine that compiles them itself")
    options = parser.parse_args(arguments)
    try:
        compiled = None if options.without_kernels else options.kernels
        found = make(
            options.out.resolve(), compiled, resolve_model(DEFAULT_MODEL), lambda text: print(text, flush=True)
        )
        tree = tree_bytes(ROOT)
    except (PackError, OSError, subprocess.CalledProcessError) as error:
        print(f"gpu-pack: {error}", file=sys.stderr)
        return 1
    for part in (*found, Part("this tree", tree, TREE)):
        print(f"{part.name:<28}{part.bytes / MIB:7.2f} MiB of {part.limit / MIB:.1f}")
    print(f"{'in all':<28}{(sum(part.bytes for part in found) + tree) / MIB:7.2f} MiB of {CARRIED / MIB:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

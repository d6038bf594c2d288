"""What travels to a machine with a GPU: which files, how heavy, and that they are found there."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from ops.gpu import pack, truncated, unpack
from ops.gpu.compile import INIT
from runner.loader.gguf import GgufCheckpoint


def test_the_shares_leave_room_for_the_tree() -> None:
    assert sum(pack.LIMITS.values()) + pack.TREE == 64 << 20
    tree = pack.tree_bytes(pack.ROOT)
    assert 1 << 20 < tree <= pack.TREE, f"the tree weighs {tree / 2**20:.1f} MiB: cut the model's layers"
    assert set(pack.MISSING) <= set(pack.LIMITS)


@pytest.fixture(scope="module")
def whole(real_model_path: Path) -> GGUFReader:
    return GGUFReader(real_model_path)


def test_the_model_keeps_its_share(whole: GGUFReader) -> None:
    """By arithmetic, from the sizes in the file: nothing is written here."""
    total = 0
    for tensor in whole.tensors:
        block = tensor.name.split(".")[1] if tensor.name.startswith("blk.") else "0"
        part = truncated.VOCABULARY / int(tensor.shape[-1]) if tensor.name == "token_embd.weight" else 1.0
        total += int(tensor.n_bytes * part) if int(block) < truncated.LAYERS else 0
    assert 0.9 * pack.LIMITS[unpack.MODEL] < total < pack.LIMITS[unpack.MODEL]


def test_a_truncated_model_is_the_first_layers_of_the_real_one(
    real_model_path: Path, whole: GGUFReader, tmp_path: Path
) -> None:
    truncated.truncate(real_model_path, tmp_path / unpack.MODEL, layers=2, vocabulary=4096)
    cut = GgufCheckpoint(tmp_path / unpack.MODEL)
    assert (cut.config.num_layers, cut.config.vocab_size, cut.tokenizer_vocab_size) == (2, 4096, 4096)
    stored = {tensor.name: tensor for tensor in GGUFReader(tmp_path / unpack.MODEL).tensors}
    assert len(stored) == 2 + 2 * 9
    for tensor in whole.tensors:
        if tensor.name in stored:
            found = stored[tensor.name]
            assert found.tensor_type == tensor.tensor_type
            assert np.array_equal(found.data, tensor.data[: len(found.data)]), tensor.name


def test_a_part_that_is_too_heavy_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "msgspec.zip").write_bytes(b"x" * 10)
    (tmp_path / unpack.MODEL).write_bytes(b"x" * 20)
    found = pack.parts(tmp_path)
    assert [(part.name, part.bytes) for part in found] == [("model.gguf", 20), ("msgspec.zip", 10)]
    pack.check_budget(found, 0)
    with pytest.raises(pack.PackError, match=r"the tree weighs 65\.0 MiB"):
        pack.check_budget(found, 65 << 20)
    monkeypatch.setitem(pack.LIMITS, unpack.MODEL, 19)
    with pytest.raises(pack.PackError, match=r"model\.gguf weighs"):
        pack.check_budget(pack.parts(tmp_path), 0)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(pack.PackError, match=r"notes\.txt is no part of the pack"):
        pack.parts(tmp_path)


def test_versions_are_those_that_are_pinned() -> None:
    text = (pack.ROOT / "constraints.txt").read_text()
    assert "flashinfer-python==0.6.14" in pack.pinned(pack.MISSING, text)
    with pytest.raises(pack.PackError, match=r"pins no version of zlib, xz"):
        pack.pinned(["msgspec", "zlib", "xz"], text)


def archive(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as out:
        for name in names:
            out.writestr(name, name)
    return path


def test_what_nothing_reads_without_a_compiler_stays_behind(tmp_path: Path) -> None:
    wheel = archive(
        tmp_path / "flashinfer_python-0.6.14-py3-none-any.whl",
        "flashinfer/__init__.py",
        "flashinfer/data/csrc/decode.jinja",
        "flashinfer/data/csrc/nv_internal/big.cu",
        "flashinfer/data/cutlass/include/cute.hpp",
        "flashinfer/data/include/flashinfer/page.cuh",
    )
    pack.repack(wheel, pack.FLASHINFER, tmp_path / "out.zip")
    with zipfile.ZipFile(tmp_path / "out.zip") as opened:
        assert opened.namelist() == ["flashinfer/__init__.py", "flashinfer/data/csrc/decode.jinja"]
    assert pack.kept("msgspec", "flashinfer/data/csrc/a/b.cu") and not pack.kept("torchao", "torchao/_C_x.abi3.so")


def test_a_library_that_another_one_loads_has_to_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pack.DROPPED, "msgspec", ("lib/b",))
    wheel = tmp_path / "msgspec.whl"
    with zipfile.ZipFile(wheel, "w") as out:
        out.writestr("lib/a.so", b"\x7fELF libother.so\0")
        out.writestr("lib/b.so", b"\x7fELF")
    pack.repack(wheel, "msgspec", tmp_path / "out.zip")
    with zipfile.ZipFile(wheel, "a") as out:
        out.writestr("lib/c.so", b"\x7fELF b.so\0")
    with pytest.raises(pack.PackError, match=r"msgspec: lib/c\.so needs b\.so"):
        pack.repack(wheel, "msgspec", tmp_path / "out.zip")


def test_flashinfer_finds_its_compiled_kernels_in_the_pack(tmp_path: Path) -> None:
    """Packed, unpacked and asked as on the other machine, in a process of its own: it would compile nothing."""
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        pytest.skip("flashinfer is not installed")
    packages, installed = tmp_path / "pack" / unpack.PACKAGES, Path(spec.origin).parent
    packages.mkdir(parents=True)
    wheel = tmp_path / "wheel.whl"
    with zipfile.ZipFile(wheel, "w") as out:
        for file in installed.rglob("*"):
            name = f"flashinfer/{file.relative_to(installed)}"
            if file.is_file() and "__pycache__" not in name and pack.kept(pack.FLASHINFER, name):
                out.write(file, name)
    pack.repack(wheel, pack.FLASHINFER, packages / "flashinfer-python.zip")
    compiled = tmp_path / unpack.JIT_CACHE
    (compiled / "page").mkdir(parents=True)
    (compiled / "page" / "page.so").touch()
    (compiled / "__init__.py").write_text(INIT)
    assert pack.pack_kernels(compiled, packages / f"{unpack.JIT_CACHE}.zip") == ["page"]
    site = tmp_path / "site"
    assert unpack.unpack(tmp_path / "pack", site) == ["flashinfer-python.zip", "flashinfer_jit_cache.zip"]
    program = (
        "import flashinfer\n"
        "from ops.gpu.compile import Wanted, specs\n"
        "from ops.gpu.unpack import compiled_modules\n"
        "found = [(spec.name, spec.is_aot) for spec in specs(Wanted((64,), (('bfloat16', 'bfloat16'),)))]\n"
        "print(flashinfer.__file__, len(found), [name for name, ready in found if ready], compiled_modules())\n"
    )
    environment = unpack.environment(site, pack.ROOT, {"PATH": "/usr/bin:/bin", "CUDA_HOME": str(tmp_path)})
    assert environment["FLASHINFER_DISABLE_JIT"] == "1"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == f"{site}/flashinfer/__init__.py 7 ['page'] ['page']"


def test_a_pack_without_kernels_is_made_only_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pack.main(["--out", str(tmp_path / "out"), "--kernels", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.startswith(f"gpu-pack: no compiled kernels in {tmp_path / 'none'}: run make")

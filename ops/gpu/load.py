"""Phase `load`: what this machine is, and whether the compiled kernels are those that the runner asks for."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from ops.gpu.report import Checks
from ops.gpu.setting import Setting
from ops.gpu.unpack import compiled_modules
from runner.cuda.library import PINNED

PACKAGES = ("flashinfer-python", "apache-tvm-ffi", "msgspec", "pyzmq", "gguf", "safetensors", "torchao", "numpy")
NEEDED = ("page", "silu_and_mul", "norm", "rope", "sampling", "batch_decode", "batch_prefill")


def run(checks: Checks, setting: Setting) -> None:
    """Facts first, then what must hold."""
    checks.measured("software", f"Python {platform.python_version()}, torch {torch.__version__}, {_versions()}")
    with checks.attempt("device") as found:
        free, total = setting.device.memory()
        properties = torch.cuda.get_device_properties(setting.device.torch)
        found.detail = f"{properties.name}, sm_{properties.major}{properties.minor}, CUDA {torch.version.cuda}"
        found.numbers |= {"SMs": properties.multi_processor_count, "GiB": total / 2**30, "free_GiB": free / 2**30}
    with checks.attempt("flashinfer") as found:
        found.detail = f"{setting.module.__version__} from {os.path.dirname(setting.module.__file__)}"
        found.need(setting.module.__version__ == PINNED, f"is {setting.module.__version__}, pinned is {PINNED}")
    with checks.attempt("compiled kernels") as found:
        names = compiled_modules()
        found.numbers["modules"] = len(names)
        missing = [part for part in NEEDED if not any(name.startswith(part) for name in names)]
        found.need(not missing, f"not compiled ahead: {', '.join(missing)}")


def _versions() -> str:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)

"""Phase `ceilings`: what this device can do at most, measured: bytes moved and products added in a second."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from ops.gpu.report import Checks
from ops.gpu.setting import Setting
from runner.cuda.device import Device

BYTES = 4 << 30
SIDE = 8192
WARM_UPS, REPEATS = 3, 15


def seconds(device: Device, run: Callable[[], object], repeats: int = REPEATS, warm_ups: int = WARM_UPS) -> float:
    """The median of the device's times for `run`."""
    for _ in range(warm_ups):
        run()
    marks = []
    for _ in range(repeats):
        began = device.mark()
        run()
        marks.append((began, device.mark()))
    marks[-1][1].synchronize()
    return median(max(began.elapsed_time(ended), 1e-6) for began, ended in marks) / 1e3


def run(checks: Checks, setting: Setting, size: int = BYTES, side: int = SIDE) -> None:
    """Random numbers: products of zeros draw less power and run faster than any model's."""
    with checks.attempt("memory bandwidth") as found:
        copied, read = _bandwidth(setting.device, size)
        found.numbers |= {"copy_TB_per_s": copied / 1e12, "read_TB_per_s": read / 1e12}
        found.numbers["bytes_per_s"] = max(copied, read)  # what was reached by either can be reached
    with checks.attempt("matrix rate") as found:
        rate = _matrix_rate(setting.device, side)
        found.numbers |= {"TFLOP_per_s": rate / 1e12, "flops_per_s": rate}


def _bandwidth(device: Device, size: int) -> tuple[float, float]:
    """Bytes per second of a copy, read and written counted, and of a sum."""
    source = torch.empty(size // 4, device=device.torch).normal_()
    target = torch.empty_like(source)
    copied = 2 * size / seconds(device, lambda: target.copy_(source))
    return copied, size / seconds(device, lambda: torch.sum(source))


def _matrix_rate(device: Device, side: int) -> float:
    """FLOPs per second of a square product in bfloat16."""
    a, b = (torch.empty(side, side, dtype=torch.bfloat16, device=device.torch).normal_() for _ in range(2))
    out = torch.empty_like(a)
    return 2 * side**3 / seconds(device, lambda: torch.mm(a, b, out=out))

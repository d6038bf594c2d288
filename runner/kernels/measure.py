"""Times a model's step on this CPU, native kernels beside plain torch: `python -m runner.kernels.measure`.

Weights are random, in the shape of SmolLM2-135M: time doesn't depend on the values. The two are measured in turns, so
that what else the machine does hits both; of a busy machine believe the minimum, of a quiet one the median.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from runner.attention.base import AttentionBackend
from runner.kernels.select import Choice, select_attention, select_ops
from runner.metadata import BatchMetadata, build
from runner.model.config import ModelConfig
from runner.model.decoder import Decoder
from runner.model.parameters import fused_shapes, layout
from runner.model.rope import RopeSpec

PAGE_SIZE = 16
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope=RopeSpec("default", 100_000.0, 64),
    max_context=8192,
    tie_word_embeddings=True,
)

Rows = Sequence[tuple[int, int]]  # (tokens already in the pages, tokens of this step)
CASES: dict[str, Rows] = {
    "1 decode, context 192": [(191, 1)],
    "16 decodes, context 192": [(191, 1)] * 16,
    "64 decodes, context 192": [(191, 1)] * 64,
    "prefill of 128": [(0, 128)],
    "15 decodes and a prefill of 128": [(191, 1)] * 15 + [(0, 128)],
    "1 decode, context 4096": [(4095, 1)],
    "prefill of 1024": [(0, 1024)],
}


class Stopwatch:
    """Stands in for an object and adds up the seconds spent in each of its methods."""

    def __init__(self, subject: Any, seconds: dict[str, float], prefix: str = "") -> None:
        self._subject, self._seconds, self._prefix = subject, seconds, prefix

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method, key = getattr(self._subject, name), self._prefix + name

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = method(*arguments)
            self._seconds[key] += time.perf_counter() - began
            return result

        return timed


class Bench:
    """A decoder with pages for one kind of kernels, stepping through cases."""

    def __init__(self, choice: Choice, dtype: torch.dtype, pages: int) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        generator = torch.Generator().manual_seed(0)
        shapes = fused_shapes(layout(CONFIG))
        parameters = {
            name: (torch.randn(shape, generator=generator) * 0.02).to(dtype) for name, shape in shapes.items()
        }
        self.decoder = Decoder(CONFIG, parameters, select_ops(dtype, "cpu", choice), CONFIG.max_context)
        shape = (CONFIG.num_layers, pages, 2, PAGE_SIZE, CONFIG.num_kv_heads, CONFIG.head_dim)
        pools = list(torch.zeros(shape, dtype=dtype))
        heads = (CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim)
        self.attention: AttentionBackend = select_attention(pools, *heads, CONFIG.attention_scale, choice)

    def profile(self) -> None:
        """From now on, fill `seconds` by operation; for that, go operation by operation instead of all in one call."""
        self.decoder._stack = None
        self.decoder._ops = Stopwatch(self.decoder._ops, self.seconds)  # type: ignore[assignment]
        self.attention = Stopwatch(self.attention, self.seconds, "attention.")  # type: ignore[assignment]

    def step(self, meta: BatchMetadata) -> float:
        """Seconds of one whole step: plan, layers, logits of each row's last token."""
        token_ids = torch.from_numpy(meta.positions * 7919 % CONFIG.vocab_size)
        last = torch.from_numpy(meta.qo_indptr[1:].astype(np.int64) - 1)
        began = time.perf_counter()
        self.attention.plan(meta)
        hidden = self.decoder.forward(token_ids, torch.from_numpy(meta.positions), self.attention)
        self.decoder.logits(hidden[last])
        return time.perf_counter() - began


def metadata(rows: Rows, pages: int) -> BatchMetadata:
    """The rows over pages in random order, as a pool in use has them."""
    starts, counts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    needed = -(-(starts + counts) // PAGE_SIZE)
    table = np.zeros((len(rows), needed.max()), np.int32)
    order = np.random.default_rng(0).permutation(pages - 1)[: needed.sum()].astype(np.int32) + 1
    table[np.arange(needed.max()) < needed[:, None]] = order
    return build(table, starts, counts, PAGE_SIZE)


def main() -> int:
    """Print a table: milliseconds a step, median and minimum, for each case and each kind of kernels."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=15, help="steps per case and kind (default 15)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--only", choices=("native", "torch"), help="measure one kind only")
    parser.add_argument("--profile", action="store_true", help="also print milliseconds by operation")
    options = parser.parse_args()
    pages = 1 + max(sum(-(-(start + count) // PAGE_SIZE) for start, count in rows) for rows in CASES.values())
    kinds: list[Choice] = [options.only] if options.only else ["native", "torch"]
    benches = {kind: Bench(kind, getattr(torch, options.dtype), pages) for kind in kinds}
    print(f"{options.dtype}, {torch.get_num_threads()} threads; milliseconds: median (minimum) of {options.repeat}")
    print(f"{'':34}" + "".join(f"{kind:>20}" for kind in kinds))
    for name, rows in CASES.items():
        meta = metadata(rows, pages)
        times: dict[str, list[float]] = defaultdict(list)
        for turn in range(options.repeat + 2):
            for kind, bench in benches.items():
                elapsed = 1e3 * bench.step(meta)
                if turn >= 2:  # the first two warm caches and threads
                    times[kind].append(elapsed)
        cells = [f"{statistics.median(times[kind]):.1f} ({min(times[kind]):.1f})" for kind in kinds]
        print(f"{name:34}" + "".join(f"{cell:>20}" for cell in cells), flush=True)
    if options.profile:
        _print_profile(benches, pages, options.repeat)
    return 0


def _print_profile(benches: dict[Choice, Bench], pages: int, repeat: int) -> None:
    for bench in benches.values():
        bench.profile()
    for name, rows in CASES.items():
        meta = metadata(rows, pages)
        for kind, bench in benches.items():
            bench.seconds.clear()
            total = sum(bench.step(meta) for _ in range(repeat))
            parts = sorted(bench.seconds.items(), key=lambda part: -part[1])
            rest = total - sum(bench.seconds.values())
            text = ", ".join(f"{part} {1e3 * seconds / repeat:.2f}" for part, seconds in [*parts, ("the rest", rest)])
            print(f"{name}, {kind}: {text}")


if __name__ == "__main__":
    raise SystemExit(main())

"""`triptych costs`: what KV memory, a cold prefill and a swap cost for one model, and where recompute and swap tie.

Only reads sizes and prints arithmetic from `scheduler.costs`; it measures nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ops.bench.serve import Formatter, positive_float, positive_int, write_report
from ops.models import resolve_model
from protocol.settings import SettingError
from scheduler import costs
from scheduler.costs import NAMED_SHAPES, ModelShape

SCHEMA = "triptych.costs/1"
GIB = 1 << 30
SHAPE_OPTIONS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")
LINK_GB_S, RATE_TFLOP_S = 64.0, 400.0

DEFINITIONS = f"""definitions:
  KV per token      2 (K and V) x layers x kv-heads x head-dim x dtype-bytes.
  cold prefill      2 x N x n + 2 x n^2 x heads x head-dim x layers FLOPs for n tokens: every weight is a multiply and
                    an add, and causal attention sees half of the n^2 pairs. N is the model's parameter count:
                    --params, else what a named shape's publisher states, else counted, embeddings included.
  swap              the whole KV over the link, out when preempted and in when resumed.
  tie               the surviving prefix above which prefilling the rest is quicker than the swap. Later tokens attend
                    to more, so the rest costs more than its share; "if all tokens cost the same" leaves that out.

The default rates are a PCIe 5.0 x16 link ({LINK_GB_S:g} GB/s) and an H100 at 40 % of its 989 dense bf16 TFLOP/s.
With them Llama-3-8B at 8,192 tokens ties at 91.9 % survival, or at 91.0 % if all tokens cost the same. A PCIe 4.0
link of 25 GB/s beside an A100 at 50 % of its 312 TFLOP/s comes to the same.

Exit code: 0 fine, 2 for wrong options or a model that can't be read."""


def positive(text: str) -> float:
    """argparse type: a finite number above 0."""
    if math.isinf(value := positive_float(text)):
        raise argparse.ArgumentTypeError(f"{text} is not finite")
    return value


def build_parser() -> argparse.ArgumentParser:
    """The options of `triptych costs`."""
    parser = argparse.ArgumentParser(
        prog="triptych costs",
        description="Prints what KV memory, recompute and swap cost for a model, and where recompute and swap tie.",
        epilog=DEFINITIONS,
        formatter_class=Formatter,
    )
    model = parser.add_argument_group("model: a name, a path, or a shape")
    model.add_argument(
        "--model",
        metavar="NAME",
        help=f"one of {', '.join(NAMED_SHAPES)}; or a GGUF file or Hugging Face directory (llama-3-8b if no shape)",
    )
    for name in SHAPE_OPTIONS:
        model.add_argument(f"--{name.replace('_', '-')}", type=positive_int, metavar="N", help="of a shape of your own")
    model.add_argument("--tied", action="store_true", help="a shape of your own: the head shares the embedding")
    model.add_argument("--params", type=positive, metavar="N", help="parameter count to reckon with (8e9)")
    model.add_argument("--dtype-bytes", type=positive_int, default=2, help="bytes of one KV element")

    setting = parser.add_argument_group("setting")
    setting.add_argument("--kv-memory", type=positive, default=40.0, metavar="GIB", help="memory for KV pages")
    setting.add_argument("--block-size", type=positive_int, default=16, metavar="TOKENS", help="tokens per block")
    setting.add_argument("--context", type=positive_int, default=8192, metavar="TOKENS", help="tokens of the request")
    setting.add_argument("--link", type=positive, default=LINK_GB_S, metavar="GB_S", help="host link, one way")
    rate = setting.add_mutually_exclusive_group()
    rate.add_argument("--tflops", type=positive, default=RATE_TFLOP_S, metavar="T", help="prefill, TFLOP/s")
    rate.add_argument("--tokens-per-s", type=positive, metavar="R", help="prefill, measured tokens/s instead")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write JSON to FILE, or to stdout")
    return parser


def shape_of(options: argparse.Namespace) -> tuple[str, ModelShape]:
    """The model's name and shape. Raises SettingError for options that don't name one, or a file that can't be read."""
    given = {name: getattr(options, name) for name in SHAPE_OPTIONS if getattr(options, name) is not None}
    if given and options.model:
        raise SettingError(f"--model and --{next(iter(given)).replace('_', '-')} exclude each other")
    if given or options.tied:
        missing = [f"--{name.replace('_', '-')}" for name in SHAPE_OPTIONS if name not in given]
        if missing:
            raise SettingError(f"a shape of your own also needs {', '.join(missing)}")
        try:
            name, shape = "own shape", ModelShape(**given, tied_embeddings=options.tied)
        except ValueError as error:
            raise SettingError(str(error)) from error
    else:
        name = options.model or "llama-3-8b"
        known = NAMED_SHAPES.get(name.lower())
        name, shape = (name.lower(), known) if known else (name, read_shape(resolve_model(name)))
    return name, replace(
        shape, dtype_bytes=options.dtype_bytes, stated_parameters=int(options.params or shape.stated_parameters)
    )


def read_shape(path: Path) -> ModelShape:
    """The shape of the model in a GGUF file or Hugging Face directory. Raises SettingError if it can't be told."""
    try:
        from runner.loader.gguf import GgufCheckpoint
        from runner.model.config import from_huggingface
        from runner.model.errors import ModelError
    except ModuleNotFoundError as error:
        raise SettingError(
            f"--model: reading {path} needs the Python package {error.name} (pip install 'triptych[cpu]'); "
            "a named shape or a shape of your own doesn't"
        ) from error
    try:
        if path.is_dir():
            config = from_huggingface(json.loads((path / "config.json").read_text()))
        else:
            config = GgufCheckpoint(path).config
    except (ModelError, OSError, ValueError) as error:
        raise SettingError(f"--model: {path}: {error}") from error
    return ModelShape(
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        tied_embeddings=config.tie_word_embeddings,
    )


def build_report(name: str, shape: ModelShape, options: argparse.Namespace) -> dict[str, Any]:
    """All figures as JSON-ready values: bytes, tokens, FLOPs, seconds, fractions."""
    tokens, block_size, link = options.context, options.block_size, options.link * 1e9
    if options.tokens_per_s:
        rate = {"tokens_per_s": options.tokens_per_s}
        prefill = costs.prefill_at_tokens(tokens, options.tokens_per_s)
    else:
        rate = {"flops_per_s": options.tflops * 1e12}
        prefill = costs.prefill_at_flops(shape, tokens, options.tflops * 1e12)
    swap = costs.swap_seconds(shape, tokens, block_size, link)
    blocks = costs.pool_blocks(shape, options.kv_memory * GIB, block_size)
    return {
        "schema": SCHEMA,
        "model": name,
        "shape": asdict(shape),
        "parameters": shape.parameters,
        "counted_parameters": costs.count_parameters(shape),
        "kv_bytes_per_token": costs.kv_bytes_per_token(shape),
        "kv_memory_bytes": int(options.kv_memory * GIB),
        "block_size": block_size,
        "pool_blocks": blocks,
        "pool_tokens": blocks * block_size,
        "context_tokens": tokens,
        "context_blocks": costs.blocks_of(tokens, block_size),
        "context_kv_bytes": costs.blocks_of(tokens, block_size) * block_size * costs.kv_bytes_per_token(shape),
        "fits": costs.blocks_of(tokens, block_size) <= blocks - costs.NULL_BLOCKS,
        "link_bytes_per_s": link,
        "prefill_rate": rate,
        "cold_flops": costs.prefill_flops(shape, tokens),
        "cold_attention_flops": costs.attention_flops(shape, tokens),
        "cold_seconds": prefill.cold,
        "copy_seconds": swap / 2,
        "swap_seconds": swap,
        "tie_fraction": costs.tie_fraction(prefill, swap),
        "tie_fraction_equal_tokens": costs.tie_fraction(costs.PrefillCost(prefill.cold), swap),
    }


def render(report: Mapping[str, Any]) -> str:
    """The report as a table for a terminal."""
    block = report["kv_bytes_per_token"] * report["block_size"]
    rate = report["prefill_rate"]
    speed = f"{rate['flops_per_s'] / 1e12:g} TFLOP/s" if "flops_per_s" in rate else f"{rate['tokens_per_s']:g} tokens/s"
    rows = [
        ("parameters", _billions(report["parameters"])),
        ("counted from the shape", _billions(report["counted_parameters"])),
        ("KV per token", f"{report['kv_bytes_per_token']:,} B"),
        ("KV per block", f"{block:,} B ({report['block_size']} tokens)"),
        (
            f"pool in {report['kv_memory_bytes'] / GIB:g} GiB",
            f"{report['pool_blocks']:,} blocks = {report['pool_tokens']:,} tokens (one block is the null page)",
        ),
        (
            f"context of {report['context_tokens']:,} tokens",
            f"{report['context_blocks']:,} blocks, {report['context_kv_bytes'] / GIB:.3f} GiB"
            + ("" if report["fits"] else "; it does not fit in the pool"),
        ),
        (
            "cold prefill",
            f"{report['cold_flops'] / 1e12:.1f} TFLOP, {report['cold_attention_flops'] / 1e12:.1f} of them attention",
        ),
        ("cold recompute", f"{_milliseconds(report['cold_seconds'])} at {speed}"),
        (
            "swap, out and in",
            f"{_milliseconds(report['swap_seconds'])} at {report['link_bytes_per_s'] / 1e9:g} GB/s "
            f"({_milliseconds(report['copy_seconds'])} each way)",
        ),
        ("tie", _tie(report["tie_fraction"])),
        ("tie, if all tokens cost the same", _tie(report["tie_fraction_equal_tokens"])),
    ]
    return "\n".join([report["model"], *(f"  {label:<34}{text}" for label, text in rows)])


def _tie(fraction: float) -> str:
    if fraction == 0.0:
        return "none: recompute is quicker even when nothing survives"
    return f"{fraction * 100:.1f} % of the context survives; recompute is quicker above, swap below"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _billions(count: int) -> str:
    return f"{count / 1e9:.3f} B"


def main(argv: Sequence[str]) -> int:
    """Parses `argv`, reckons, prints; returns the exit code."""
    options = build_parser().parse_args(list(argv))
    try:
        name, shape = shape_of(options)
    except SettingError as error:
        print(f"triptych costs: {error}", file=sys.stderr)
        return 2
    report = build_report(name, shape, options)
    write_report(report, render(report), options.json)
    return 0

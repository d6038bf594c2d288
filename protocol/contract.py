"""Writes the tables and the golden bytes of CONTRACT.md from the message definitions: `python -m protocol.contract`.

The file is checked in, and a test compares it with what this module would write: the document can't drift.
"""

from __future__ import annotations

import sys
import typing
from pathlib import Path

import msgspec

from protocol import messages as m
from protocol import wire
from protocol.columns import pack_i32, pack_u64

CONTRACT = Path(__file__).with_name("CONTRACT.md")

LINKS: list[tuple[str, list[type[msgspec.Struct]]]] = [
    ("Both links", [m.Hello, m.Welcome, m.Limits, m.Refused, m.Goodbye, m.Heartbeat]),
    ("API to scheduler", [m.Submit, m.SamplingParams, m.Extend, m.Abort, m.Control]),
    (
        "Scheduler to API",
        [m.Outputs, m.Rejected, m.Finished, m.TokenLogprobs, m.PromptLogprobs, m.SchedulerStatus, m.ControlReply],
    ),
    ("Scheduler to runner", [m.Step, m.NewRequest, m.CompileGrammar, m.FetchKv]),
    ("Runner to scheduler", [m.StepResult, m.RowError, m.StepFailure, m.GrammarStatus, m.KvStatus]),
]

_PARAMS = m.SamplingParams(max_tokens=5, temperature=0.5, seed=7, stop_token_ids=(11,))

#: One message of each kind that crosses a link, with every column non-empty.
EXAMPLES: list[msgspec.Struct] = [
    m.Hello("scheduler", 1, "00112233aabbccdd", "0123456789abcdef", 41, True, "a"),
    m.Welcome("runner", 1, "00112233aabbccdd", "fedcba9876543210", 42, m.Limits("m", 16, 9, 128, 300, 4, 64, (2,))),
    m.Refused(wire.OCCUPIED, "held"),
    m.Goodbye("fenced", "bye"),
    m.Heartbeat(1_000_000, 900_000),
    m.Submit(
        2**63 + 1,
        pack_i32([1, 2, 3]),
        _PARAMS,
        pack_i32([9]),
        5,
        -1,
        "label",
        "salt",
        "tenant",
        True,
        adapter="lora",
        adapter_generation=2,
    ),
    m.Extend(1, pack_i32([4]), True),
    m.Abort(pack_u64([1, 2])),
    m.Control(5, "set", {"max_num_seqs": "8"}),
    m.ControlReply(5, True, b"{}"),
    m.CompileGrammar(1, "regex:a+"),
    m.GrammarStatus(1, "no"),
    m.FetchKv(1, 2, "peer/7", 16, pack_i32([3])),
    m.KvStatus(1, 2, 16),
    m.Outputs(
        42,
        3,
        pack_u64([1]),
        pack_i32([0]),
        pack_i32([17]),
        pack_u64([2]),
        [m.Rejected(4, "queue_full", "later", 503, 1)],
        [m.Finished(1, m.RequestStatus.STOPPED, 2, 1, 0, 0, 10)],
        [m.TokenLogprobs(1, 0, -0.5, 1, pack_i32([17]), b"\0\0\0\xbf")],
        [m.PromptLogprobs(2, 1, 1, b"\0\0\0\xbf", pack_i32([1]), pack_i32([6]), b"\0\0\0\xbf")],
    ),
    m.SchedulerStatus(42, "ready", 1, 2, 0.5),
    m.Step(
        42,
        3,
        pack_u64([1, 2]),
        pack_i32([1, 3]),
        [m.NewRequest(2, 1, pack_i32([5, 6, 7]), 3, 0, pack_i32([4]), _PARAMS)],
        pack_u64([9]),
        pack_i32([0]),
        pack_i32([1]),
        pack_i32([3]),
        pack_i32([2]),
        bytes(range(16)),
    ),
    m.StepResult(
        42, 3, pack_u64([2]), pack_i32([1]), pack_i32([3]), pack_i32([17]), queue_ns=1, execute_ns=2, idle_ns=3
    ),
]


def _type_name(hint: object) -> str:
    names = {bytes: "column", str: "string", int: "integer", float: "float", bool: "boolean"}
    if hint in names:
        return names[hint]
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return (
            f"[{_type_name(arguments[0])}…]"
            if arguments[-1] is Ellipsis
            else f"[{', '.join(map(_type_name, arguments))}]"
        )
    if typing.get_origin(hint) is list:
        return f"[{_type_name(arguments[0])}…]"
    if type(None) in arguments:
        return f"{_type_name(arguments[0])} or nil"
    if isinstance(hint, type) and issubclass(hint, m.RequestStatus):
        return "integer (status)"
    return f"`{hint.__struct_config__.tag}`" if hasattr(hint, "__struct_config__") else str(hint)


def tables() -> str:
    """Markdown tables of every message, field by field."""
    lines: list[str] = []
    for title, classes in LINKS:
        lines += [f"### {title}", ""]
        for cls in classes:
            hints = typing.get_type_hints(cls)
            optional = len(cls.__struct_fields__) - len(cls.__struct_defaults__)
            lines.append(f"**`{cls.__struct_config__.tag}`** {(cls.__doc__ or '').splitlines()[0]}")
            lines.append("")
            for index, name in enumerate(cls.__struct_fields__):
                default = "" if index < optional else " (optional)"
                lines.append(f"{index + 1}. `{name}`: {_type_name(hints[name])}{default}")
            lines.append("")
    lines += ["Status numbers: " + ", ".join(f"{s.value} {s.name}" for s in m.RequestStatus) + ".", ""]
    return "\n".join(lines)


def golden() -> str:
    """Each example as a frame with session 7 and sequence 1, in hex."""
    codec: wire.Codec[typing.Any] = wire.Codec(typing.Any)
    lines = ["Session 7, sequence 1. The values are in `protocol/contract.py`.", ""]
    for example in EXAMPLES:
        frame = codec.encode(example, 7, 1).hex()
        lines += [f"`{example.__struct_config__.tag}`", "", "```"]
        lines += [frame[start : start + 100] for start in range(0, len(frame), 100)]
        lines += ["```", ""]
    return "\n".join(lines)


def render(text: str) -> str:
    """`text` with its generated parts replaced."""
    for mark, content in (("tables", tables()), ("golden", golden())):
        opening = f"<!-- {mark} -->"
        closing = f"<!-- end of {mark} -->"
        head, _, rest = text.partition(opening)
        tail = rest.partition(closing)[2] if closing in rest else rest
        text = f"{head}{opening}\n\n{content}\n{closing}{tail}"
    return text


def main() -> int:
    """Rewrite CONTRACT.md."""
    CONTRACT.write_text(render(CONTRACT.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

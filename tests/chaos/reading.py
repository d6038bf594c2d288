"""Answers as a client reads them, streamed or whole, and how one compares with its undisturbed twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

LOGPROB_TOLERANCE = 1e-3
"""Batches of another shape round differently in the last bits; tokens are compared exactly."""


@dataclass(slots=True)
class Choice:
    """All of one choice, in the order of its arrival."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[str, float]] = field(default_factory=list)
    ends: list[tuple[str, int | str | None]] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """What came of one request. `faults` are breaches of form; `error` is an error that the server reported."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, int] | None = None
    faults: list[str] = field(default_factory=list)
    error: str = ""
    done: bool = False
    chunks: int = 0

    def read_whole(self, status: int, body: bytes) -> None:
        """Take in an answer that was not streamed."""
        content = msgspec.json.decode(body)
        if status != 200:
            self.error = f"{status} {content['error']}"
            return
        self.done = True
        self._take(content, "message")

    def read_event(self, event: bytes) -> int:
        """Take in one SSE event; the number of tokens (or pieces of text) that were new in it."""
        if event.startswith(b":"):
            return 0
        if self.done:
            self.faults.append(f"an event after [DONE]: {event[:80]!r}")
        if event == b"data: [DONE]":
            self.done = True
            return 0
        content = msgspec.json.decode(event.removeprefix(b"data: "))
        if "error" in content:
            self.error = str(content["error"])
            return 0
        return self._take(content, "delta")

    def _take(self, content: dict[str, Any], holder: str) -> int:
        fresh = 0
        if content.get("usage"):
            usage = content["usage"]
            self.usage = {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
        for part in content["choices"]:
            choice = self.choices.setdefault(part["index"], Choice())
            if choice.ends:
                self.faults.append(f"choice {part['index']} goes on after its end")
            text = part[holder].get("content") or "" if holder in part else part["text"]
            ids = part.get("token_ids") or []
            choice.text += text
            choice.token_ids += ids
            choice.logprobs += _logprobs(part.get("logprobs"))
            if part["finish_reason"] is not None:
                choice.ends.append((part["finish_reason"], part.get("stop_reason")))
            fresh += len(ids) or bool(text)
        self.chunks += 1
        return fresh

    def check_form(self, *, streamed: bool) -> None:
        """Say what is missing of an answer that has been read to its end."""
        if self.error:
            return
        if streamed and not self.done:
            self.faults.append("the stream ended without [DONE]")
        if self.usage is None:
            self.faults.append("no usage")
        for index, choice in self.choices.items():
            if len(choice.ends) != 1:
                self.faults.append(f"choice {index} has {len(choice.ends)} ends")


def _logprobs(given: dict[str, Any] | None) -> list[tuple[str, float]]:
    if given is None:
        return []
    if "content" in given:
        return [(entry["token"], entry["logprob"]) for entry in given["content"]]
    values = (0.0 if value is None else value for value in given["token_logprobs"])  # an echo's first token has none
    return list(zip(given["tokens"], values, strict=True))


@dataclass(slots=True)
class Difference:
    """How an answer differs from its twin: tokens lost and repeated, and everything else in words."""

    lost: int = 0
    repeated: int = 0
    others: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.lost or self.repeated or self.others)

    def __str__(self) -> str:
        return "; ".join([f"{self.lost} lost, {self.repeated} repeated", *self.others])


def compare(twin: Answer, answer: Answer, *, whole: bool) -> Difference:
    """What differs. An answer that was cut short by its client or by its API's death (not `whole`) is a beginning."""
    found = Difference()
    if whole and twin.choices.keys() != answer.choices.keys():
        found.others.append(f"choices {sorted(answer.choices)} instead of {sorted(twin.choices)}")
    if whole and answer.usage != twin.usage:
        found.others.append(f"usage {answer.usage} instead of {twin.usage}")
    for index, choice in answer.choices.items():
        _compare_choice(twin.choices[index], choice, found, whole=whole)
    return found


def _compare_choice(twin: Choice, choice: Choice, found: Difference, *, whole: bool) -> None:
    ends = twin.ends if whole else twin.ends[: len(choice.ends)]
    if choice.ends != ends:
        found.others.append(f"end {choice.ends} instead of {ends}")
    # Without ids the text tells: a token that is gone or doubled is then counted in characters.
    _classify(twin.token_ids or twin.text, choice.token_ids or choice.text, found, whole=whole)
    text = twin.text if whole else twin.text[: len(choice.text)]
    if choice.text != text and not (found.lost or found.repeated):
        found.others.append(f"text {choice.text[-80:]!r} instead of {text[-80:]!r}")
    pairs = list(zip(twin.logprobs, choice.logprobs, strict=False))
    if whole and len(twin.logprobs) != len(choice.logprobs):
        found.others.append(f"{len(choice.logprobs)} logprobs instead of {len(twin.logprobs)}")
    elif any(a[0] != b[0] or abs(a[1] - b[1]) > LOGPROB_TOLERANCE for a, b in pairs):
        found.others.append("other logprobs")


def _classify(twin: Sequence[Any], got: Sequence[Any], found: Difference, *, whole: bool) -> None:
    """Find the first place where `got` leaves its twin, and what explains the rest: a gap, a repetition, or neither."""
    expected = twin if whole else twin[: len(got)]
    if got == expected:
        return
    same = next((i for i, (a, b) in enumerate(zip(twin, got, strict=False)) if a != b), min(len(twin), len(got)))
    rest = got[same:]
    for shift in range(1, len(twin) + 1):
        after, again = twin[same + shift :], twin[max(0, same - shift) :]
        if rest == (after if whole else after[: len(rest)]) and same + shift <= len(twin):
            found.lost += shift
            return
        if shift <= same and rest == (again if whole else again[: len(rest)]):
            found.repeated += shift
            return
    found.others.append(f"from {same} on {list(rest[:8])} instead of {list(twin[same : same + 8])}")

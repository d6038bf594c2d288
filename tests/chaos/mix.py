"""What the clients of a storm ask for: a seeded mix of everything that has state which a death could lose.

Two asks with one seed are the same, so each has an undisturbed twin. Not a workload model: `ops.bench` has those.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MODEL = "smollm2-135m-instruct"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = (
    "the sea is wide and a small boat goes out before dawn while nobody on the shore counts gulls or waves "
    "because rain has come over hills where seven old houses stand in a row with green doors and no smoke"
).split()
PREAMBLE = " ".join(WORDS * 2)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Bounds of prompts, in words, and of outputs, in tokens."""

    prompt: tuple[int, int]
    output: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the mix. `body` says nothing of streaming: each client asks either way."""

    name: str
    path: str
    body: Mapping[str, Any]


Traits = dict[str, Any]


def _seeded(rng: random.Random) -> Traits:
    return {"temperature": 0.9, "top_p": 0.95, "seed": rng.randrange(2**31)}


def _greedy(rng: random.Random) -> Traits:
    """With a seed too: the simulated model goes by it at any temperature."""
    return {**_seeded(rng), "temperature": 0}


def _several(rng: random.Random) -> Traits:
    return {**_seeded(rng), "n": 2}


def _stops(rng: random.Random) -> Traits:
    """Common letters, so that stops are met, and half met, all the time."""
    return {**_seeded(rng), "stop": ["qu", " the", "ee", "\n\n"], "min_tokens": 12}


def _penalties(rng: random.Random) -> Traits:
    return {**_seeded(rng), "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2}


def _biased(rng: random.Random) -> Traits:
    return {**_seeded(rng), "logit_bias": {str(rng.randrange(1000, 9000)): 4.0}, "top_k": 40, "min_p": 0.01}


TRAITS: tuple[tuple[str, str, Callable[[random.Random], Traits]], ...] = (
    ("greedy", COMPLETIONS, lambda rng: {**_greedy(rng), "return_token_ids": False}),
    ("seeded", COMPLETIONS, _seeded),
    ("two choices", COMPLETIONS, _several),
    ("logprobs", COMPLETIONS, lambda rng: {**_seeded(rng), "logprobs": 2}),
    ("chat", CHAT, _seeded),
    ("chat logprobs", CHAT, lambda rng: {**_greedy(rng), "logprobs": True, "top_logprobs": 2}),
    ("stops", COMPLETIONS, _stops),
    ("stops with logprobs", COMPLETIONS, lambda rng: {**_stops(rng), "logprobs": 1}),
    ("penalties", COMPLETIONS, _penalties),
    ("to the limit", COMPLETIONS, lambda rng: {**_seeded(rng), "ignore_eos": True}),
    ("biased", CHAT, _biased),
    ("echo", COMPLETIONS, lambda rng: {**_greedy(rng), "echo": True, "min_tokens": 4}),
    ("echo with logprobs", COMPLETIONS, lambda rng: {**_greedy(rng), "echo": True, "logprobs": 1}),
    ("brief", COMPLETIONS, lambda rng: {**_seeded(rng), "max_tokens": rng.randint(1, 3)}),
    ("long prompt", COMPLETIONS, lambda rng: {**_greedy(rng), "max_tokens": 8}),
)


def mix(seed: int, count: int, lengths: Lengths) -> list[Ask]:
    """`count` asks, all traits in turn, the first half of them behind one shared prefix."""
    rng = random.Random(f"mix {seed}")
    return [_ask(rng, number, lengths, shared=number * 2 < count) for number in range(count)]


def _ask(rng: random.Random, number: int, lengths: Lengths, *, shared: bool) -> Ask:
    name, path, traits = TRAITS[number % len(TRAITS)]
    shortest, longest = lengths.prompt
    words = longest if name == "long prompt" else rng.randint(shortest, (shortest + longest) // 2)
    text = f"{PREAMBLE if shared else ''} {number} " + " ".join(rng.choices(WORDS, k=words))
    prompt: Traits = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    body = {"model": MODEL, **prompt, "max_tokens": rng.randint(*lengths.output), "return_token_ids": True}
    return Ask(f"{number} {name}", path, {**body, **traits(rng)})

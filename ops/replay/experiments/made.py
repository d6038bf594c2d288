"""Traces that are made up for one question each. Deterministic: no clock, seeded numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator

from ops.replay.experiments.spec import Made
from protocol.trace import TraceLine

BLOCK = 16
POOL = 20_480
STREAMS = 40


def runway(reserve: float) -> Made:
    """40 streams that leave just `reserve` of the pool free, and grow by 2.5 blocks a step from there on."""
    free = int(reserve * (POOL + 1))

    def lines(requests: int) -> list[TraceLine]:
        blocks, longer = divmod(POOL - free, requests)
        # Ends spread over the places in a block, so that blocks fill up evenly.
        return [
            TraceLine(
                at_s=0.0,
                prompt_tokens=(blocks + (index < longer)) * BLOCK - index * BLOCK // requests,
                output_tokens=2000,
            )
            for index in range(requests)
        ]

    return Made(f"runway_{reserve:g}", STREAMS, lines)


def _steady(requests: int) -> list[TraceLine]:
    rng = random.Random(40)
    return [
        TraceLine(at_s=0.0, prompt_tokens=rng.randint(6400, 8000), output_tokens=rng.randint(200, 1800))
        for _ in range(requests)
    ]


STEADY = Made("steady", 600, _steady)
"""All there at once: prompts of 7,200 tokens, answers of 1,000, of which the pool of 20,480 blocks holds about 40."""


def prefixes(rate: float) -> Made:
    """60 groups with 4,000 tokens in common each, the popular ones more often, at `rate` requests a second."""

    def lines(requests: int) -> list[TraceLine]:
        rng = random.Random(4)
        weights = [1 / (1 + group) ** 0.6 for group in range(60)]
        at = 0.0
        found = []
        for group in rng.choices(range(60), weights, k=requests):
            at += rng.expovariate(rate)
            own = rng.randint(100, 700)
            found.append(
                TraceLine(
                    at_s=round(at, 6),
                    prompt_tokens=4000 + own,
                    output_tokens=rng.randint(20, 120),
                    prefix=((group, 4000),),
                )
            )
        return found

    return Made(f"prefixes_{rate:g}", 1500, lines)


def decoding(prompt: int, outputs: int) -> Made:
    """Requests of equal total weight whose share of outputs differs, all there at once."""

    def lines(requests: int) -> list[TraceLine]:
        rng = random.Random(5)

        def near(value: int) -> int:
            return rng.randint(value * 7 // 10, value * 13 // 10)

        return [TraceLine(at_s=0.0, prompt_tokens=near(prompt), output_tokens=near(outputs)) for _ in range(requests)]

    return Made(f"decoding_{prompt}_{outputs}", 400, lines)


def _poisson(rng: random.Random, rate: float, upto_s: float) -> Iterator[float]:
    at = rng.expovariate(rate)
    while at < upto_s:
        yield round(at, 6)
        at += rng.expovariate(rate)


def _long_and_short(requests: int) -> list[TraceLine]:
    rng = random.Random(6)
    span = requests / 14
    short = [
        TraceLine(at_s=at, prompt_tokens=rng.randint(1000, 2500), output_tokens=20, tenant="short")
        for at in _poisson(rng, 14.0, span)
    ]
    long = [
        TraceLine(at_s=at, prompt_tokens=12_000, output_tokens=20, tenant="long")
        for at in _poisson(rng, 0.2, span * 0.5)
    ]
    return sorted([*short, *long], key=lambda line: line.at_s)


LONG_AND_SHORT = Made("long_and_short", 3000, _long_and_short)
"""Short prompts that take all of the machine and a few long ones."""


def _urgent_and_batch(requests: int) -> list[TraceLine]:
    rng = random.Random(7)
    span = requests / 14
    urgent = [
        TraceLine(at_s=at, prompt_tokens=rng.randint(1000, 2500), output_tokens=20, priority=0, tenant="urgent")
        for at in _poisson(rng, 14.0, span)
    ]
    batch = [
        TraceLine(at_s=at, prompt_tokens=1500, output_tokens=20, priority=5, tenant="batch")
        for at in _poisson(rng, 1.0, span * 0.5)
    ]
    return sorted([*urgent, *batch], key=lambda line: line.at_s)


URGENT_AND_BATCH = Made("urgent_and_batch", 3000, _urgent_and_batch)
"""Urgent requests that take all of the machine, and some that may wait."""


def _heavy_and_light(requests: int) -> list[TraceLine]:
    rng = random.Random(8)
    span = requests / 14
    heavy = [
        TraceLine(at_s=at, prompt_tokens=rng.randint(1000, 3000), output_tokens=rng.randint(50, 150), tenant="heavy")
        for at in _poisson(rng, 13.0, span)
    ]
    light = [
        TraceLine(at_s=at, prompt_tokens=rng.randint(1000, 3000), output_tokens=rng.randint(50, 150), tenant="light")
        for at in _poisson(rng, 1.0, span)
    ]
    return sorted([*heavy, *light], key=lambda line: line.at_s)


HEAVY_AND_LIGHT = Made("heavy_and_light", 3000, _heavy_and_light)
"""One tenant asks for more than the machine has, another for a thirteenth of that."""

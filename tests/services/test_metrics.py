"""The histograms: many values at once count like one after the other."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry

from services.metrics import TOKEN_SECONDS, FastHistogram


def test_many_values_at_once_count_like_one_after_the_other() -> None:
    rng = random.Random(1)
    registry = CollectorRegistry()
    one, many = (FastHistogram(name, "h", TOKEN_SECONDS, "m", registry) for name in ("one_seconds", "many_seconds"))
    for length in (0, 3, 500):
        values = [rng.choice([rng.expovariate(20.0), *TOKEN_SECONDS, 100.0]) for _ in range(length)]
        many.observe_all(values)
        for value in values:
            one.observe(value)
    buckets = [
        [(sample.labels.get("le"), round(sample.value, 6)) for family in found.collect() for sample in family.samples]
        for found in (one, many)
    ]
    assert buckets[0] == buckets[1] and one.count == many.count == 503

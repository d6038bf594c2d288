"""The API service's Prometheus metrics. Per-token observations cost well under a microsecond: plain lists, no locks.

Collects only what this process knows; the other processes' text is appended by the route that serves /metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from services.journal import Generation

# Buckets in seconds: from a tiny model on a fast device (1 ms a token) to a large one under load.
# fmt: off
FINISH_REASONS = ("stop", "length", "repetition", "error", "aborted")
TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0,
    2.5, 5.0, 10.0,
)
FIRST_SECONDS = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0,
)
MANY = 32
REQUEST_SECONDS = (
    0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0,
)
# fmt: on


class FastHistogram(Collector):
    """A histogram for one thread that observes and others that scrape: a bisection and two additions."""

    def __init__(self, name: str, help: str, buckets: Sequence[float], model: str, registry: CollectorRegistry) -> None:
        self._name, self._help, self._model = name, help, model
        self._bounds = list(buckets)
        self._edges = np.asarray(buckets, np.float64)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self._counts)

    def observe(self, value: float) -> None:
        """Count one value, in the unit that the name says."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Count each of these: for many at once it costs a fraction of as many calls."""
        if len(values) < MANY:
            for value in values:
                self.observe(value)
            return
        places = self._edges.searchsorted(values)
        for place, count in enumerate(np.bincount(places, minlength=len(self._counts)).tolist()):
            self._counts[place] += count
        self._sum += sum(values)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """One family with cumulative buckets."""
        counts, total, cumulated = list(self._counts), self._sum, 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip([*(str(float(b)) for b in self._bounds), "+Inf"], counts, strict=True):
            cumulated += count
            buckets.append((bound, cumulated))
        family = HistogramMetricFamily(self._name, self._help, labels=["model_name"])
        family.add_metric([self._model], buckets, total)
        yield family


class _LiveGauges(Collector):
    """Gauges read from their owners at scrape time, so that they can't go stale."""

    def __init__(self, model: str, registry: CollectorRegistry) -> None:
        self._model = model
        self.sources: list[tuple[str, str, Callable[[], float]]] = []
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, help, read in self.sources:
            family = GaugeMetricFamily(name, help, labels=["model_name"])
            family.add_metric([self._model], read())
            yield family


class ApiMetrics:
    """All metrics of one API process, labelled with the served model's name."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self.registry = registry
        self.model = model
        self._gauges = _LiveGauges(model, registry)

        def histogram(name: str, help: str, buckets: Sequence[float]) -> FastHistogram:
            return FastHistogram(f"triptych_api_{name}", help, buckets, model, registry)

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"triptych_api_{name}", help, ("model_name", *labels), registry=registry)

        self.first_token = histogram(
            "time_to_first_token_seconds", "Time from a request's arrival to its first token.", FIRST_SECONDS
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds",
            "Time between one token of a request and its next, as they reach this process.",
            TOKEN_SECONDS,
        )
        self.per_output_token = histogram(
            "time_per_output_token_seconds",
            "Per finished request: mean time between its tokens, without the first.",
            TOKEN_SECONDS,
        )
        self.end_to_end = histogram(
            "e2e_request_latency_seconds", "Time from a request's arrival to its end.", REQUEST_SECONDS
        )
        self.queue = histogram(
            "request_queue_seconds", "Time a request waited in the scheduler until first admitted.", FIRST_SECONDS
        )
        self.requests = counter(
            "requests_total", "HTTP requests answered, by route and HTTP status.", "endpoint", "status"
        )
        self._prompt_tokens = counter("prompt_tokens_total", "Prompt tokens of finished requests.")
        self._cached_tokens = counter(
            "cached_prompt_tokens_total", "Prompt tokens of finished requests that came from the prefix cache."
        )
        self._generation_tokens = counter("generation_tokens_total", "Tokens received from the scheduler.")
        self._finished = counter(
            "requests_finished_total",
            "Generations (choices) ended, by reason: stop, length, repetition, error, aborted.",
            "finish_reason",
        )
        self._disconnects = counter(
            "client_disconnects_total", "Requests whose client went away before the answer was complete."
        )
        self._write_timeouts = counter(
            "write_timeouts_total", "Requests given up because the client did not read their answer in time."
        )
        self._unknown_fields = counter(
            "unknown_fields_total", "Fields in request bodies that this server does not know and ignored."
        )
        self._resubmitted = counter(
            "resubmitted_total", "Live requests submitted again after the scheduler was replaced or the link reopened."
        )
        self._turned_away = counter(
            "turned_away_total",
            "Requests refused here, before they were tokenized, because the scheduler's queue is full.",
        )
        self._lost_tokens = counter(
            "lost_tokens_total", "Tokens missing from what the scheduler sent; their requests ended with an error."
        )
        self._duplicate_tokens = counter(
            "duplicate_tokens_total", "Tokens received a second time after a resubmission and dropped."
        )
        self._recorded = counter("recorded_requests_total", "Generations (choices) written to the recording.")
        self._record_lost = counter(
            "record_lost_requests_total",
            "Generations missing from the recording: a full disk, or one that is too slow.",
        )
        # A label set exists from the start, so that a counter that never moved reads 0 and not "no data".
        self.prompt_tokens = self._prompt_tokens.labels(model)
        self.cached_tokens = self._cached_tokens.labels(model)
        self.generation_tokens = self._generation_tokens.labels(model)
        self.disconnects = self._disconnects.labels(model)
        self.write_timeouts = self._write_timeouts.labels(model)
        self.unknown_fields = self._unknown_fields.labels(model)
        self.resubmitted = self._resubmitted.labels(model)
        self._away = self._turned_away.labels(model)
        self.lost_tokens = self._lost_tokens.labels(model)
        self.duplicate_tokens = self._duplicate_tokens.labels(model)
        self.recorded = self._recorded.labels(model)
        self.record_lost = self._record_lost.labels(model)
        self.finished = {r: self._finished.labels(model, r) for r in FINISH_REASONS}

    def token_counts(self) -> tuple[float, float]:
        """Prompt tokens and generated tokens so far."""
        return self.value("prompt_tokens_total"), self.value("generation_tokens_total")

    def value(self, name: str) -> float:
        """What `triptych_api_<name>` reads now; for a metric without labels of its own."""
        return self.registry.get_sample_value(f"triptych_api_{name}", {"model_name": self.model}) or 0.0

    def gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Export `read()` as `triptych_api_<name>`. It is called from the scraping thread."""
        self._gauges.sources.append((f"triptych_api_{name}", help, read))

    def generation_over(self, generation: Generation, now: float) -> None:
        """Count one generation's end; call it once for each."""
        finished = generation.finished
        outcome = generation.outcome or ("error" if generation.error is not None else "aborted")
        self.finished[outcome].inc()
        self.prompt_tokens.inc(generation.num_prompt_tokens)
        if finished is not None:
            self.cached_tokens.inc(finished.num_cached_tokens)
            self.queue.observe(finished.queue_ns / 1e9)
        if generation.outcome:
            self.end_to_end.observe(now - generation.arrived)
            count = len(generation.tokens)
            if count > 1:
                self.per_output_token.observe((generation.last_token - generation.first_token) / (count - 1))

    def turned_away(self) -> None:
        """Count a request that was refused before it became a generation, as if it had been one."""
        self._away.inc()
        self.finished["error"].inc()

    def request_done(self, endpoint: str, status: int) -> None:
        """Count one answered HTTP request."""
        self.requests.labels(self.model, endpoint, str(status)).inc()

"""What the runner counts, as Prometheus metrics in a registry of its own, and one log line that says the same."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from protocol.exposition import new_registry
from protocol.messages import Limits, Step, StepResult
from runner.link import SchedulerLink

log = logging.getLogger("triptych.runner")

# From one decode of a small model on a GPU to a long prefill of a large one on a CPU.
STEP_BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30, 60),
)
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
TOKEN_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class _LinkCollector(Collector):
    """Reads the link's own counters when scraped."""

    def __init__(self, link: SchedulerLink) -> None:
        self._link = link

    def collect(self) -> list[CounterMetricFamily]:
        stats, channel = self._link.stats, self._link.channel.stats
        numbers = (
            ("bad_frames", "Frames on the scheduler link that were not messages of this protocol.", channel.bad_frames),
            ("lost_frames", "Frames that the scheduler sent and that never arrived.", channel.lost_frames),
            ("stale_frames", "Frames of a session that is over or never was; replays, too.", channel.stale_frames),
            ("refused_hellos", "Refusals: other builds or roles, peers without a session.", channel.refused_hellos),
            ("failed_handshakes", "Connections that spoke no ZeroMQ or had no key of ours.", channel.failed_handshakes),
            ("stale_steps", "Steps dropped because their sender no longer commands this runner.", stats.stale_steps),
            ("unsent_results", "Step results whose scheduler was gone when they were ready.", stats.unsent_results),
            ("scheduler_grants", "Schedulers that were given command of this runner.", stats.grants),
            ("schedulers_fenced", "Schedulers that another one replaced while they still held on.", stats.fenced),
            ("schedulers_refused", "Schedulers turned away because another one was in command.", stats.refused),
        )
        return [CounterMetricFamily(f"triptych_runner_{name}", text, value=value) for name, text, value in numbers]


@dataclass
class _Window:
    """Sums since the last log line."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    sampled: int = 0
    busy_ns: int = 0
    idle_ns: int = 0


class RunnerMetrics:
    """Metrics of one runner process; `registry` is what gets served."""

    def __init__(self, limits: Limits, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or new_registry("runner")
        self._window = _Window()

        def counter(name: str, text: str) -> Counter:
            return Counter(f"triptych_runner_{name}", text, registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"triptych_runner_{name}", text, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"triptych_runner_{name}", text, buckets=buckets, registry=self.registry)

        self._steps = counter("steps_total", "Steps executed, failed ones included.")
        self._failed = Counter(
            "triptych_runner_failed_steps_total",
            "Steps that failed as a whole, by cause; their requests are computed again.",
            ["code"],
            registry=self.registry,
        )
        self._row_errors = Counter(
            "triptych_runner_failed_rows_total",
            "Requests that failed alone inside a step, by cause (non_finite_logits: the model gave NaN or infinity).",
            ["code"],
            registry=self.registry,
        )
        self._row_errors.labels("non_finite_logits")
        self._tokens = counter("tokens_computed_total", "Tokens computed, prompt and output, recomputed ones included.")
        self._sampled = counter("tokens_sampled_total", "Output tokens sampled.")
        self._seconds = histogram("step_seconds", "Time to execute one step.", STEP_BUCKETS)
        self._queued = histogram("step_queue_seconds", "Time a step waited between receipt and start.", STEP_BUCKETS)
        self._rows = histogram("step_rows", "Requests in one step.", ROW_BUCKETS)
        self._step_tokens = histogram("step_tokens", "Tokens computed in one step.", TOKEN_BUCKETS)
        self._idle = counter("idle_seconds_total", "Time between steps with no step to execute.")
        self._copying = counter("copy_seconds_total", "Time in steps that copies of swapped KV blocks took.")
        self._residents = gauge("resident_requests", "Requests whose state is in the runner's batch.")
        self._cached = gauge("cached_blocks", "KV blocks whose content is known by hash and may be reused.")
        self._load_seconds = gauge("load_seconds", "Time it took to load the model.")
        self._weight_bytes = gauge("weights_bytes", "Memory that the model's weights take.")
        pool = gauge("kv_blocks", "KV blocks in the pool, the null block not counted.")
        pool.set(limits.num_blocks - 1)
        gauge("kv_bytes", "Memory of the whole KV pool.").set(limits.num_blocks * limits.kv_bytes_per_block)
        gauge("kv_block_tokens", "Tokens in one KV block.").set(limits.block_size)

    def watch(self, link: SchedulerLink) -> None:
        """Also report the link's counters."""
        self.registry.register(_LinkCollector(link))

    def loaded(self, seconds: float, weight_bytes: int) -> None:
        """Loading has ended."""
        self._load_seconds.set(seconds)
        self._weight_bytes.set(weight_bytes)

    def step_done(self, step: Step, result: StepResult, residents: int, cached: int) -> None:
        """Count one executed step. `result` carries its timings."""
        window = self._window
        self._steps.inc()
        self._seconds.observe(result.execute_ns / 1e9)
        self._queued.observe(result.queue_ns / 1e9)
        self._idle.inc(result.idle_ns / 1e9)
        self._copying.inc(result.copy_ns / 1e9)
        window.steps += 1
        window.busy_ns += result.execute_ns
        window.idle_ns += result.idle_ns
        self._residents.set(residents)
        self._cached.set(cached)
        for error in result.errors:
            self._row_errors.labels(error.code).inc()
        if result.failure is not None:
            self._failed.labels(result.failure.code).inc()
            return
        rows, sampled = len(step.num_tokens) // 4, len(result.tokens) // 4
        tokens = int(np.frombuffer(step.num_tokens, "<i4").sum())
        self._tokens.inc(tokens)
        self._sampled.inc(sampled)
        self._rows.observe(rows)
        self._step_tokens.observe(tokens)
        window.rows += rows
        window.tokens += tokens
        window.sampled += sampled

    def log_line(self, elapsed_s: float) -> None:
        """One line about what happened since the last; silent when nothing did."""
        window, self._window = self._window, _Window()
        if window.steps == 0:
            return
        log.info(
            "%.0f steps/s, %.1f ms each, %.1f rows and %.1f tokens a step, %.0f sampled/s, busy %.0f %%, idle %.0f %%",
            window.steps / elapsed_s,
            window.busy_ns / window.steps / 1e6,
            window.rows / window.steps,
            window.tokens / window.steps,
            window.sampled / elapsed_s,
            window.busy_ns / elapsed_s / 1e7,
            window.idle_ns / elapsed_s / 1e7,
        )

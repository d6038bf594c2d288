"""The scheduler's Prometheus metrics. Everything is derived from `Stats` and from what the process times itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from protocol.channels import LinkStats
from scheduler.interface import Stats

PREFIX = "triptych_scheduler_"
QUEUE_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
PASS_BUCKETS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.5)
PARKED = ("waiting_for_grammar", "waiting_for_remote_kv", "waiting_for_input")
ROUND_TRIP_BUCKETS = (0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 3, 10, 30, 100)


Collector = TypeVar("Collector", Counter, Gauge, Histogram)


class Metrics:
    """Owns the collectors. `sync` brings them up to date; it is called a few times a second, never per token.

    Several replicas share them: each adds its number as a last label, `replica`. With one there is no such label.
    """

    def __init__(self, registry: CollectorRegistry, replica: str = "", like: Metrics | None = None) -> None:
        """`like` has the collectors already, if another replica's metrics have made them."""
        made: dict[str, Any] = {}
        if like is not None:
            made = like._made
        self._made: dict[str, Any] = made
        last = self._last = (replica,) if replica else ()
        more = ("replica",) if replica else ()

        def own(kind: type[Collector], name: str, text: str, labels: Sequence[str], **options: Any) -> Collector:
            if name not in made:
                made[name] = kind(PREFIX + name, text, (*labels, *more), registry=registry, **options)
            collector: Collector = made[name]
            return collector.labels(*last) if last and not labels else collector

        def counter(name: str, text: str, *labels: str) -> Counter:
            return own(Counter, name, text, labels)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return own(Gauge, name, text, labels)

        self.running = gauge("requests_running", "Requests that hold a slot and compute in steps")
        self.waiting = gauge("requests_waiting", "Requests that wait to be admitted, by reason", "reason")
        self.kv_usage = gauge("kv_cache_usage_ratio", "Share of KV blocks that some request holds, 0 to 1")
        self.kv_blocks = gauge("kv_cache_blocks", "KV blocks, by state (free includes cached blocks)", "state")
        self.in_flight = gauge("steps_in_flight", "Steps sent to the runner whose result is awaited")
        self.runner_up = gauge("runner_up", "1 if a runner has welcomed this scheduler and answers, else 0")
        self.runner_stuck = gauge("runner_stuck", "1 while a runner is there that doesn't answer, or whose step hangs")
        if "api_processes" not in made:
            made["api_processes"] = Gauge(PREFIX + "api_processes", "API processes with a session", registry=registry)
        self.apis: Gauge = made["api_processes"]
        self.epoch = gauge("epoch", "Epoch in which this scheduler commands its runner (0: none yet)")
        self.steps = counter("steps", "Steps sent to the runner")
        self.started = counter("requests_accepted", "Requests accepted from APIs")
        self.finished = counter("requests_finished", "Requests that ended, by how", "reason")
        self.rejected = counter("requests_rejected", "Requests refused at the door, by reason", "reason")
        self.preemptions = counter("preemptions", "Times a running request lost its blocks to another")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of admitted requests")
        self.generated_tokens = counter("generated_tokens", "Output tokens received from the runner")
        self.scheduled_tokens = counter("scheduled_tokens", "Tokens put into steps: prompts, outputs and replays")
        self.replayed_tokens = counter("replayed_tokens", "Tokens computed again after preemption or failure")
        self.prefix_queries = counter("prefix_cache_queried_tokens", "Prompt tokens looked up in the prefix cache")
        self.prefix_hits = counter("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache")
        self.evictions = counter("prefix_cache_evictions", "Cached blocks overwritten to make room")
        self.stale_tokens = counter("stale_tokens", "Tokens dropped because their request had moved on")
        self.failed_steps = counter("failed_steps", "Steps that the runner reported as failed")
        self.culprits = counter("culprits", "Requests that ended because they made steps fail or the runner die")
        self.quarantined = gauge("requests_quarantined", "Requests that may have made a step fail, and run apart")
        self.admission_held = counter(
            "admission_held_passes",
            "Passes in which the head of the queue was held back, by the test that bound",
            "test",
        )
        self.bad_frames = counter("bad_frames", "Frames that could not be decoded, by link", "link")
        self.lost_frames = counter("lost_frames", "Frames missing from a peer's sequence, by link", "link")
        self.stale_frames = counter(
            "stale_frames", "Frames of a session that is over or never was, replayed ones among them, by link", "link"
        )
        self.refused_hellos = counter(
            "refused_hellos", "Refusals: other builds, other roles, peers without a session, by link", "link"
        )
        self.failed_handshakes = counter(
            "failed_handshakes", "Connections that spoke another protocol or had no key of ours, by link", "link"
        )
        self.swapped_blocks = counter("swapped_out_blocks", "KV blocks copied to the host at preemptions")
        self.queue_flips = counter(
            "queue_order_flips", "Changes between the policy's own order and first come, because of the queue's length"
        )
        self.new_token_ratio = gauge(
            "new_token_ratio", "Predictive admission: share of their limits that running requests are expected to use"
        )
        self.forecast_peak = gauge(
            "forecast_peak_blocks", "Forecast admission: KV blocks at the fullest, with the newcomer last tested"
        )
        self.preemptions_per_request = own(
            Histogram,
            "request_preemptions",
            "Preemptions of each request that has ended",
            (),
            buckets=(0, 1, 2, 3, 5, 10, 20),
        )
        self.queue_seconds = own(
            Histogram,
            "queue_time_seconds",
            "Time from a request's arrival here to its first admission",
            (),
            buckets=QUEUE_BUCKETS,
        )
        self.pass_seconds = own(
            Histogram,
            "pass_seconds",
            "Time to decide one step, and to apply one result",
            ("part",),
            buckets=PASS_BUCKETS,
        )
        self.round_trip_seconds = own(
            Histogram,
            "step_round_trip_seconds",
            "Time from sending a step to receiving its result, waiting for earlier steps included",
            (),
            buckets=ROUND_TRIP_BUCKETS,
        )
        self._pass = self.pass_seconds.labels("schedule", *last)
        self._update = self.pass_seconds.labels("update", *last)
        self._seen: dict[tuple[str, ...], int] = {}

    @classmethod
    def of_replicas(cls, registry: CollectorRegistry, count: int) -> list[Metrics]:
        """Those of each replica, in a registry that they share."""
        found = [cls(registry, "0" if count > 1 else "")]
        return found + [cls(registry, str(number), found[0]) for number in range(1, count)]

    def observe_pass(self, seconds: float) -> None:
        """One call of `schedule` that produced a step."""
        self._pass.observe(seconds)

    def observe_update(self, seconds: float) -> None:
        """One call of `update`."""
        self._update.observe(seconds)

    def observe_round_trip(self, seconds: float) -> None:
        """One step from its sending to its result."""
        self.round_trip_seconds.observe(seconds)

    def _count(self, counter: Counter, total: int, *labels: str, last: tuple[str, ...] | None = None) -> None:
        key = (counter._name, *labels)
        grown = total - self._seen.get(key, 0)
        if grown > 0 or key not in self._seen:
            owner = self._last if last is None else last
            (counter.labels(*labels, *owner) if labels else counter).inc(max(grown, 0))
            self._seen[key] = total

    def sync_link(self, name: str, link: LinkStats, last: tuple[str, ...]) -> None:
        """Copy a link's counters; `last` says whose it is where there are several replicas."""
        for counter, total in (
            (self.bad_frames, link.bad_frames),
            (self.lost_frames, link.lost_frames),
            (self.stale_frames, link.stale_frames),
            (self.refused_hellos, link.refused_hellos),
            (self.failed_handshakes, link.failed_handshakes),
        ):
            self._count(counter, total, name, last=last)

    def sync_apis(self, num_peers: int, link: LinkStats) -> None:
        """What all replicas have in common."""
        self.apis.set(num_peers)
        self.sync_link("api", link, ("",) if self._last else ())

    def sync(self, stats: Stats, in_flight: int, links: dict[str, LinkStats]) -> None:
        """Copy levels and counters; drain the samples."""
        self.running.set(stats.running)
        self.waiting.labels("preempted", *self._last).set(stats.preempted_waiting)
        self.waiting.labels("capacity", *self._last).set(stats.waiting - stats.preempted_waiting)
        for reason in PARKED:
            self.waiting.labels(reason.removeprefix("waiting_for_"), *self._last).set(stats.parked.get(reason, 0))
        if stats.new_token_ratio is not None:
            self.new_token_ratio.set(stats.new_token_ratio)
        if stats.forecast_peak_blocks is not None:
            self.forecast_peak.set(stats.forecast_peak_blocks)
        held = stats.usable_blocks - stats.free_blocks
        self.kv_usage.set(held / stats.usable_blocks if stats.usable_blocks else 0)
        self.kv_blocks.labels("free", *self._last).set(stats.free_blocks)
        self.kv_blocks.labels("held", *self._last).set(held - stats.draining_blocks)
        self.kv_blocks.labels("draining", *self._last).set(stats.draining_blocks)
        self.in_flight.set(in_flight)
        self.quarantined.set(stats.quarantined)
        for counter, total in (
            (self.steps, stats.steps),
            (self.started, stats.started),
            (self.preemptions, stats.preemptions),
            (self.prompt_tokens, stats.prompt_tokens),
            (self.generated_tokens, stats.generated_tokens),
            (self.scheduled_tokens, stats.scheduled_tokens),
            (self.replayed_tokens, stats.replayed_tokens),
            (self.prefix_queries, stats.prefix_queried_tokens),
            (self.prefix_hits, stats.prefix_hit_tokens),
            (self.evictions, stats.evictions),
            (self.stale_tokens, stats.stale_tokens),
            (self.failed_steps, stats.failed_steps),
            (self.culprits, stats.culprits),
            (self.swapped_blocks, stats.swapped_out_blocks),
            (self.queue_flips, stats.queue_flips),
        ):
            self._count(counter, total)
        for labelled, totals in (
            (self.finished, stats.finished),
            (self.rejected, stats.rejected),
            (self.admission_held, stats.held_passes),
        ):
            for label, total in totals.items():
                self._count(labelled, total, str(label).lower())
        for name, link in links.items():
            self.sync_link(name, link, self._last)
        counts, stats.preemption_counts = stats.preemption_counts, []
        for count in counts:
            self.preemptions_per_request.observe(count)
        samples, stats.queue_seconds = stats.queue_seconds, []
        for seconds in samples:
            self.queue_seconds.observe(seconds)

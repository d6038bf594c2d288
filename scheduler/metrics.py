"""The scheduler's Prometheus metrics. Everything is derived from `Stats` and from what the process times itself."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from protocol.channels import LinkStats
from scheduler.interface import Stats

PREFIX = "triptych_scheduler_"
QUEUE_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
PASS_BUCKETS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.5)
PARKED = ("waiting_for_grammar", "waiting_for_remote_kv", "waiting_for_input")
ROUND_TRIP_BUCKETS = (0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 3, 10, 30, 100)


class Metrics:
    """Owns the collectors. `sync` brings them up to date; it is called a few times a second, never per token."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(PREFIX + name, text, labels, registry=registry)

        self.running = gauge("requests_running", "Requests that hold a slot and compute in steps")
        self.waiting = gauge("requests_waiting", "Requests that wait to be admitted, by reason", "reason")
        self.kv_usage = gauge("kv_cache_usage_ratio", "Share of KV blocks that some request holds, 0 to 1")
        self.kv_blocks = gauge("kv_cache_blocks", "KV blocks, by state (free includes cached blocks)", "state")
        self.in_flight = gauge("steps_in_flight", "Steps sent to the runner whose result is awaited")
        self.runner_up = gauge("runner_up", "1 if a runner has welcomed this scheduler and answers, else 0")
        self.runner_stuck = gauge("runner_stuck", "1 while a runner is there that doesn't answer, or whose step hangs")
        self.apis = gauge("api_processes", "API processes with a session")
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
        self.preemptions_per_request = Histogram(
            PREFIX + "request_preemptions",
            "Preemptions of each request that has ended",
            buckets=(0, 1, 2, 3, 5, 10, 20),
            registry=registry,
        )
        self.queue_seconds = Histogram(
            PREFIX + "queue_time_seconds",
            "Time from a request's arrival here to its first admission",
            buckets=QUEUE_BUCKETS,
            registry=registry,
        )
        self.pass_seconds = Histogram(
            PREFIX + "pass_seconds",
            "Time to decide one step, and to apply one result",
            ["part"],
            buckets=PASS_BUCKETS,
            registry=registry,
        )
        self.round_trip_seconds = Histogram(
            PREFIX + "step_round_trip_seconds",
            "Time from sending a step to receiving its result, waiting for earlier steps included",
            buckets=ROUND_TRIP_BUCKETS,
            registry=registry,
        )
        self._pass = self.pass_seconds.labels("schedule")
        self._update = self.pass_seconds.labels("update")
        self._seen: dict[tuple[str, ...], int] = {}

    def observe_pass(self, seconds: float) -> None:
        """One call of `schedule` that produced a step."""
        self._pass.observe(seconds)

    def observe_update(self, seconds: float) -> None:
        """One call of `update`."""
        self._update.observe(seconds)

    def _count(self, counter: Counter, total: int, *labels: str) -> None:
        key = (counter._name, *labels)
        grown = total - self._seen.get(key, 0)
        if grown > 0 or key not in self._seen:
            (counter.labels(*labels) if labels else counter).inc(max(grown, 0))
            self._seen[key] = total

    def sync(self, stats: Stats, in_flight: int, links: dict[str, LinkStats]) -> None:
        """Copy levels and counters; drain the samples."""
        self.running.set(stats.running)
        self.waiting.labels("preempted").set(stats.preempted_waiting)
        self.waiting.labels("capacity").set(stats.waiting - stats.preempted_waiting)
        for reason in PARKED:
            self.waiting.labels(reason.removeprefix("waiting_for_")).set(stats.parked.get(reason, 0))
        if stats.new_token_ratio is not None:
            self.new_token_ratio.set(stats.new_token_ratio)
        if stats.forecast_peak_blocks is not None:
            self.forecast_peak.set(stats.forecast_peak_blocks)
        held = stats.usable_blocks - stats.free_blocks
        self.kv_usage.set(held / stats.usable_blocks if stats.usable_blocks else 0)
        self.kv_blocks.labels("free").set(stats.free_blocks)
        self.kv_blocks.labels("held").set(held - stats.draining_blocks)
        self.kv_blocks.labels("draining").set(stats.draining_blocks)
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
            self._count(self.bad_frames, link.bad_frames, name)
            self._count(self.lost_frames, link.lost_frames, name)
            self._count(self.stale_frames, link.stale_frames, name)
            self._count(self.refused_hellos, link.refused_hellos, name)
            self._count(self.failed_handshakes, link.failed_handshakes, name)
        counts, stats.preemption_counts = stats.preemption_counts, []
        for count in counts:
            self.preemptions_per_request.observe(count)
        samples, stats.queue_seconds = stats.queue_seconds, []
        for seconds in samples:
            self.queue_seconds.observe(seconds)

"""The scheduler's configuration: every limit and every choice of strategy, with its default, unit and range."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.settings import setting

PRESET_NAMES = ("triptych", "vllm", "sglang", "sglang-lpm", "credit")
QUEUE_NAMES = (
    *("fcfs", "priority", "lpm", "dfs-weight", "lof", "random", "routing-key"),
    *("hrrn", "shortest-prefill", "fair", "deadline", "on-time"),
)
ADMISSION_NAMES = ("optimistic", "predictive", "forecast", "credit")
BATCH_NAMES = ("mixed", "paced", "prefill-first", "serial", "static", "dynamic")
VICTIM_NAMES = ("last-admitted", "priority", "least-progress", "most-recoverable")
RECOVERY_NAMES = ("recompute", "swap", "auto")
PLACEMENT_NAMES = ("prefix", "least-loaded", "round-robin")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of one scheduler process. Limits of the model and its KV pool come from the runner, not from here."""

    runtime_dir: str = setting("/tmp/triptych", help="private directory for sockets")
    scheduler_address: str = setting("", help="where APIs connect (empty: ipc socket in the runtime directory)")
    runner_address: str = setting(
        "", help="where the runner listens, or with commas where each replica does (empty: in the runtime directory)"
    )
    data_parallel_size: int = setting(
        1, help="runners with a copy of the model each, among which requests are placed", minimum=1, maximum=64
    )
    placement_policy: str = setting(
        "prefix",
        help="several replicas: which one a request goes to; prefix: where its prefix is cached, while loads are even",
        choices=PLACEMENT_NAMES,
    )
    placement_min_match: float = setting(
        0.3, help="placement by prefix: part of the prompt that must be cached to decide", minimum=0, maximum=1
    )
    placement_balance_tokens: int = setting(
        0,
        help="placement by prefix: loads that differ by more than this, and by placement_balance_ratio, are uneven "
        "(0: eight full steps)",
        unit="tokens",
        minimum=0,
    )
    placement_balance_ratio: float = setting(
        1.5, help="placement by prefix: the heaviest load over the lightest above which they are uneven", minimum=1
    )
    replica_patience_s: float = setting(
        3.0,
        help="several replicas: how long requests wait for a runner that is gone before they go to another",
        unit="s",
        minimum=0,
    )
    curve_key_file: str = setting(
        "", help="key pair that `triptych keygen` wrote; over TCP only processes with the same pair are let in"
    )
    allow_insecure_bind: bool = setting(
        False, help="listen on a TCP address that others can reach although there is no key"
    )
    log_level: str = setting("info", help="log level", choices=("debug", "info", "warning", "error"))
    log_interval_s: float = setting(
        10.0, help="time between two status lines while requests are live", unit="s", minimum=0.1
    )
    metrics_port: int = setting(
        0, help="TCP port for Prometheus (0: unix socket only)", unit="port", minimum=0, maximum=65535
    )
    metrics_host: str = setting("127.0.0.1", help="interface for the metrics port")

    preset: str = setting("triptych", help="named combination of strategies", choices=PRESET_NAMES)
    queue_policy: str = setting("", help="who is next (empty: by preset)", choices=("", *QUEUE_NAMES))
    admission_policy: str = setting("", help="may it enter (empty: by preset)", choices=("", *ADMISSION_NAMES))
    batch_policy: str = setting("", help="what fills a step (empty: by preset)", choices=("", *BATCH_NAMES))
    victim_policy: str = setting("", help="who leaves under pressure (empty: by preset)", choices=("", *VICTIM_NAMES))
    recovery_policy: str = setting("", help="how a victim returns (empty: by preset)", choices=("", *RECOVERY_NAMES))

    max_num_seqs: int = setting(256, help="slot budget: running requests", unit="requests", minimum=1)
    max_num_batched_tokens: int = setting(
        0, help="token budget of one step (0: all that the runner takes)", unit="tokens", minimum=0
    )
    watermark: float = setting(
        0.01, help="fraction of the pool kept free when a request enters", minimum=0.0, maximum=0.9
    )
    long_prefill_token_threshold: int = setting(
        0, help="most prompt tokens one request computes in a step beside others (0: no cap)", unit="tokens", minimum=0
    )
    long_prefill_token_threshold_adaptive: bool = setting(
        False, help="raise that cap to an even share of the token budget when few requests share a step"
    )
    schedule_conservativeness: float = setting(
        1.0, help="predictive admission: how much of the running requests' limits is reserved at first", minimum=0.01
    )
    clip_max_new_tokens: int = setting(
        4096,
        help="predictive admission: outputs reserved for one request at most; forecast: before it has seen any end",
        unit="tokens",
        minimum=1,
    )
    forecast_confidence: float = setting(
        0.95,
        help="forecast admission: how sure it is to be that the batch at its fullest fits the pool",
        minimum=0.5,
        maximum=0.999,
    )
    forecast_memory: int = setting(
        1000,
        help="forecast admission: ended requests whose output lengths it goes by; older ones fade",
        unit="requests",
        minimum=10,
    )
    slo_ttft_s: float = setting(0.0, help="objective for the first token, from arrival (0: none)", unit="s", minimum=0)
    slo_tpot_s: float = setting(
        0.0, help="objective for the mean time between later tokens (0: none)", unit="s", minimum=0
    )
    late_share: float = setting(
        0.9,
        help="on-time queue: most of a step's prefill that late requests get while they may wait",
        minimum=0.05,
        maximum=1,
    )
    late_patience: float = setting(
        1.18, help="on-time queue: times the worst first-come wait that late requests may wait", minimum=1
    )
    late_grace_s: float = setting(79.0, help="on-time queue: so much longer may late ones wait", unit="s", minimum=0)
    late_ahead: float = setting(
        0.1,
        help="on-time queue: the part of that longest wait within which who has to be served is served evenly, before "
        "new requests that are more work than others",
        minimum=0,
        maximum=1,
    )
    queue_seed: int = setting(0, help="random queue: its seed")
    queue_fallback_waiting: int = setting(
        128, help="waiting requests above which cache-aware orders become first-come", unit="requests", minimum=0
    )
    tenant_weights: tuple[str, ...] = setting((), help="fair queue: shares as tenant=weight (1 for those not named)")
    max_queue_age_s: float = setting(
        30.0, help="a request that has waited this long is next, whatever the order (0: no bound)", unit="s", minimum=0
    )
    max_bypasses: int = setting(
        64, help="how often others may pass a head that lacks blocks (0: never)", unit="requests", minimum=0
    )
    max_preemptions: int = setting(
        3, help="preemptions after which a request enters only where it can stay to its end (0: no bound)", minimum=0
    )
    priority_preemption_threshold: int = setting(
        10, help="priority queue: an arrival more urgent by more than this may take a place (-1: never)", minimum=-1
    )
    waiting_timeout_s: float = setting(
        0.0, help="longest wait for the first admission, then 503 (0: no limit)", unit="s", minimum=0
    )
    kv_fetch_timeout_s: float = setting(
        30.0, help="longest wait for a KV transfer, then the prompt is computed here", unit="s", minimum=0.1
    )
    page_release_delay_s: float = setting(
        0.0, help="how long the pages of a request that has ended stay out of use", unit="s", minimum=0
    )
    enable_prefix_caching: bool = setting(True, help="reuse blocks whose content is known")
    pipeline_depth: int = setting(2, help="steps in flight before a result is awaited", unit="steps", minimum=1)
    max_num_queued_reqs: int = setting(
        4096,
        help="requests that wait for their first run, above which new ones get 503 (0: no limit)",
        unit="requests",
        minimum=0,
    )
    max_step_failures: int = setting(
        3, help="steps that a request alone makes fail before it ends with the error", unit="steps", minimum=1
    )
    lease_s: float = setting(10.0, help="silence after which an API process counts as gone", unit="s", minimum=0.5)
    runner_silence_s: float = setting(5.0, help="silence after which the runner counts as gone", unit="s", minimum=0.5)
    step_deadline_s: float = setting(
        120.0,
        help="a step that takes longer, and longer than ten times the slowest so far, makes its runner count as stuck "
        "(0: none does)",
        unit="s",
        minimum=0,
    )
    scheduler_cls: str = setting(
        "scheduler.core:CoreScheduler", help="class that schedules, as module:Class (see scheduler.interface)"
    )
    takeover: bool = setting(False, help="dismiss the scheduler that holds the runner, if there is one")

    @property
    def runner_addresses(self) -> tuple[str, ...]:
        """Where each replica's runner listens. Raises ValueError if there are not as many addresses as replicas."""
        size = self.data_parallel_size
        if not self.runner_address:
            names = ["runner"] if size == 1 else [f"runner-{number}" for number in range(size)]
            return tuple(f"ipc://{self.runtime_dir}/{name}.sock" for name in names)
        addresses = tuple(address.strip() for address in self.runner_address.split(","))
        if size not in (1, len(addresses)):
            raise ValueError(f"{size} replicas (data_parallel_size), {len(addresses)} addresses in runner_address")
        if len(set(addresses)) < len(addresses):
            raise ValueError(f"runner_address: one address twice in {self.runner_address}")
        return addresses

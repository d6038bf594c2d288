"""The scheduler's configuration: every limit and every choice of strategy, with its default, unit and range."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.settings import setting


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of one scheduler process. Limits of the model and its KV pool come from the runner, not from here."""

    runtime_dir: str = setting("/tmp/triptych", help="private directory for sockets")
    scheduler_address: str = setting("", help="where APIs connect (empty: ipc socket in the runtime directory)")
    runner_address: str = setting("", help="where the runner listens (empty: ipc socket in the runtime directory)")
    log_level: str = setting("info", help="log level", choices=("debug", "info", "warning", "error"))
    log_interval_s: float = setting(
        10.0, help="time between two status lines while requests are live", unit="s", minimum=0.1
    )
    metrics_port: int = setting(
        0, help="TCP port for Prometheus (0: unix socket only)", unit="port", minimum=0, maximum=65535
    )
    metrics_host: str = setting("127.0.0.1", help="interface for the metrics port")

    preset: str = setting("triptych", help="named combination of strategies", choices=("triptych", "vllm"))
    queue_policy: str = setting("", help="who is next (empty: by preset)", choices=("", "fcfs", "priority"))
    admission_policy: str = setting("", help="may it enter (empty: by preset)", choices=("", "optimistic"))
    batch_policy: str = setting("", help="what fills a step (empty: by preset)", choices=("", "mixed"))
    victim_policy: str = setting(
        "", help="who leaves under pressure (empty: by preset)", choices=("", "last-admitted", "priority")
    )
    recovery_policy: str = setting("", help="how a victim returns (empty: by preset)", choices=("", "recompute"))

    max_num_seqs: int = setting(256, help="slot budget: running requests", unit="requests", minimum=1)
    max_num_batched_tokens: int = setting(2048, help="token budget of one step", unit="tokens", minimum=1)
    watermark: float = setting(
        0.01, help="fraction of the pool kept free when a request enters", minimum=0.0, maximum=0.9
    )
    long_prefill_token_threshold: int = setting(
        0, help="most prompt tokens one request computes in a step beside others (0: no cap)", unit="tokens", minimum=0
    )
    enable_prefix_caching: bool = setting(True, help="reuse blocks whose content is known")
    pipeline_depth: int = setting(2, help="steps in flight before a result is awaited", unit="steps", minimum=1)
    max_num_queued_reqs: int = setting(
        4096, help="waiting requests above which new ones get 503 (0: no limit)", unit="requests", minimum=0
    )
    max_step_failures: int = setting(
        3, help="failed steps a request may be part of before it ends with an error", unit="steps", minimum=1
    )
    lease_s: float = setting(10.0, help="silence after which an API process counts as gone", unit="s", minimum=0.5)
    runner_silence_s: float = setting(5.0, help="silence after which the runner counts as gone", unit="s", minimum=0.5)
    scheduler_cls: str = setting(
        "scheduler.core:CoreScheduler", help="class that schedules, as module:Class (see scheduler.interface)"
    )
    takeover: bool = setting(False, help="dismiss the scheduler that holds the runner, if there is one")

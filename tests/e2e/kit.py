"""What the end-to-end tests look at a server with: the official client, and the official parser of its metrics."""

from __future__ import annotations

from harness import NO_AUTHORITIES, Server, wait_until
from openai import DefaultHttpxClient, OpenAI
from prometheus_client.parser import text_string_to_metric_families

Samples = dict[str, float]


def client_of(server: Server, **changes: object) -> OpenAI:
    """The official client, without its retries: a test wants to see the first answer."""
    settings = {"max_retries": 0, "timeout": 60, "http_client": DefaultHttpxClient(verify=NO_AUTHORITIES)} | changes
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", **settings)  # type: ignore[arg-type]


def samples_of(server: Server) -> Samples:
    """All metrics of the three processes, read by the official parser; labels are part of the name."""
    found: Samples = {}
    for family in text_string_to_metric_families(server.request("GET", "/metrics").body.decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()) if key != "model_name")
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert name not in found, f"two series {name}"
            found[name] = sample.value
    return found


def wait_until_idle(server: Server) -> Samples:
    """Wait until nothing is live anywhere; the invariants of an idle chain hold then."""

    def idle() -> Samples | None:
        seen = samples_of(server)
        live = (
            seen["triptych_scheduler_requests_running"]
            + seen["triptych_scheduler_requests_waiting{reason=capacity}"]
            + seen["triptych_scheduler_requests_waiting{reason=preempted}"]
            + seen["triptych_scheduler_kv_cache_blocks{state=held}"]
        )
        ended = sum(
            value for name, value in seen.items() if name.startswith("triptych_scheduler_requests_finished_total")
        )
        started = seen["triptych_scheduler_requests_accepted_total"]
        return seen if live == 0 and started == ended else None

    result: Samples = wait_until(idle, 60, "an idle chain")
    return result

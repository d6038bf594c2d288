"""/health, /ready and the other status routes tell the truth about the whole chain; /metrics speaks for all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from protocol import wire
from protocol.exposition import serve_metrics
from services.errors import ApiError
from services.neighbours import fetch
from tests.services.service_kit import MODEL, MakeService, Service

WaitUntil = Callable[..., Any]
COMPLETIONS = "/v1/completions"


def status(service: Service, path: str) -> tuple[int, str | None]:
    response = service.http.get(path)
    return response.status_code, response.json()["reason"]


def test_a_working_chain_is_healthy_and_ready(service: Service) -> None:
    assert status(service, "/health") == (200, None)
    assert status(service, "/ready") == (200, None)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("runner", "absent", "runner is absent"),
        ("runner", "stuck", "runner is stuck"),
        ("stalled_ms", 61_000, "no step"),
    ],
)
def test_a_broken_runner_shows_in_health_and_its_return_too(
    service: Service, wait_until: WaitUntil, field: str, value: Any, reason: str
) -> None:
    scheduler = service.scheduler
    assert scheduler is not None
    scheduler.call(lambda: setattr(scheduler, field, value))
    wait_until(lambda: status(service, "/health")[0] == 503, 60, "health to fail")
    assert reason in (status(service, "/health")[1] or "")
    assert status(service, "/ready")[0] == 503
    scheduler.forget()
    wait_until(lambda: status(service, "/health")[0] == 200, 60, "health to return")


def test_of_several_runners_the_number_that_is_up_is_said(service: Service, wait_until: WaitUntil) -> None:
    scheduler = service.scheduler
    assert scheduler is not None
    assert "replicas" not in service.http.get("/ready").json()
    scheduler.call(lambda: setattr(scheduler, "replicas", (3, 2)))
    wait_until(lambda: service.http.get("/ready").json().get("replicas") == 3, 60, "the report")
    for path in ("/health", "/ready"):
        response = service.http.get(path)
        assert response.status_code == 200 and response.json()["replicas_up"] == 2


def test_a_long_prefill_is_healthy(service: Service, wait_until: WaitUntil) -> None:
    scheduler = service.scheduler
    assert scheduler is not None
    scheduler.call(lambda: setattr(scheduler, "stalled_ms", 30_000))
    chain = service.state.engine.chain
    wait_until(lambda: chain.status is not None and chain.status.stalled_ms == 30_000, 60, "the report")
    assert status(service, "/health") == (200, None)


def test_a_silent_scheduler_is_noticed_and_its_return_too(make_service: MakeService, wait_until: WaitUntil) -> None:
    service = make_service(heartbeat_timeout_s=1.0)
    scheduler = service.scheduler
    assert scheduler is not None
    wait_until(lambda: status(service, "/health")[0] == 200, 60, "the start")
    scheduler.silent = True
    wait_until(lambda: "silent" in (status(service, "/health")[1] or ""), 60, "health to fail")
    scheduler.silent = False
    wait_until(lambda: status(service, "/health")[0] == 200, 60, "health to return")
    service.close()


def test_a_dead_scheduler_is_noticed_and_the_next_one_too(make_service: MakeService, wait_until: WaitUntil) -> None:
    service = make_service(heartbeat_timeout_s=1.0)
    assert service.scheduler is not None
    service.scheduler.stop()
    wait_until(lambda: status(service, "/health")[0] == 503, 60, "health to fail")
    service.scheduler = service.new_scheduler(epoch=2)
    wait_until(lambda: status(service, "/ready")[0] == 200, 60, "readiness to return")
    service.close()


def test_before_the_first_scheduler_nothing_is_ready(make_service: MakeService) -> None:
    service = make_service(scheduler=False)
    assert status(service, "/health") == (503, "no scheduler is connected")
    assert status(service, "/ready")[0] == 503
    assert service.http.get("/v1/models").json()["data"][0]["max_model_len"] is None
    service.close()


def test_waiting_for_limits_ends_with_an_error_when_nobody_comes(make_service: MakeService) -> None:
    service = make_service(scheduler=False, engine_wait_s=0.3)
    response = service.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "x"})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_unavailable"
    with pytest.raises(ApiError):
        asyncio.run(service.state.engine.chain.wait_for_limits())
    service.close()


def test_the_models_route_lists_every_name_and_finds_each(make_service: MakeService) -> None:
    service = make_service(model_alias=("org/alias",))
    service.http.post(COMPLETIONS, json={"prompt": "x"})
    listed = service.client.models.list().data
    assert [model.id for model in listed] == [MODEL, "org/alias"]
    assert service.http.get("/v1/models/org/alias").json()["root"] == MODEL
    assert service.http.get(f"/v1/models/{MODEL}").json()["max_model_len"] == 2048
    assert service.http.get("/v1/models/nope").status_code == 404
    answer = service.http.post(COMPLETIONS, json={"model": "org/alias", "prompt": "x"}).json()
    assert answer["model"] == MODEL
    service.close()


def test_any_model_name_may_be_accepted(make_service: MakeService) -> None:
    service = make_service(accept_any_model=True)
    answer = service.http.post(COMPLETIONS, json={"model": "gpt-x", "prompt": "x"})
    assert (answer.status_code, answer.json()["model"]) == (200, MODEL)
    service.close()


def test_version_and_load_answer(service: Service) -> None:
    version = service.http.get("/version").json()
    assert version["schema"] == wire.SCHEMA_DIGEST
    load = service.http.get("/load").json()
    assert load["server_load"] == 0
    assert load["kv_usage"] == 0.25


def metrics_of(service: Service) -> dict[str, float]:
    """Every sample by name and labels; fails if one comes twice or the text can't be parsed."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(service.http.get("/metrics").text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name")
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert key not in found, f"{key} comes twice"
            found[key] = sample.value
    return found


def test_metrics_count_what_happened(make_service: MakeService) -> None:
    service = make_service()
    assert service.scheduler is not None
    service.scheduler.cached_tokens = 1
    prompt = [1, 2, 3]
    for _ in range(2):
        assert service.http.post(COMPLETIONS, json={"model": MODEL, "prompt": prompt}).status_code == 200
    service.http.post(COMPLETIONS, json={"model": MODEL, "prompt": prompt, "max_tokens": 2, "foo": 1})
    service.http.post(COMPLETIONS, json={"model": "nope", "prompt": prompt})
    service.http.get("/some/path")
    service.http.get("/v1/models/a/made/up/name")
    counts = metrics_of(service)
    tokens = 2 * (len(service.answer) + 1) + 2
    expected = {
        "generation_tokens_total": tokens,
        "prompt_tokens_total": 9,
        "cached_prompt_tokens_total": 3,
        "time_to_first_token_seconds_count": 3,
        "inter_token_latency_seconds_count": tokens - 3,
        "time_per_output_token_seconds_count": 3,
        "e2e_request_latency_seconds_count": 3,
        "request_queue_seconds_count": 3,
        "request_queue_seconds_sum": pytest.approx(0.003),
        "requests_total{endpoint=/v1/completions,status=200}": 3,
        "requests_total{endpoint=/v1/completions,status=404}": 1,
        "requests_total{endpoint=other,status=404}": 1,
        "requests_total{endpoint=/v1/models/{name},status=404}": 1,
        "requests_finished_total{finish_reason=stop}": 2,
        "requests_finished_total{finish_reason=length}": 1,
        "requests_finished_total{finish_reason=error}": 0,
        "requests_finished_total{finish_reason=aborted}": 0,
        "unknown_fields_total": 1,
        "requests_running": 0,
        "link_connected": 1,
        "lost_tokens_total": 0,
    }
    assert {name: counts[f"triptych_api_{name}"] for name in expected} == expected
    assert counts["triptych_api_inter_token_latency_seconds_bucket{le=+Inf}"] == tokens - 3
    service.close()


def test_every_metric_says_what_it_is_and_names_the_model(service: Service) -> None:
    text = service.http.get("/metrics").text
    assert "python_info" not in text
    for family in text_string_to_metric_families(text):
        assert len(family.documentation) > 10, family.name
        if "process" not in family.name:
            assert all(sample.labels.get("model_name") == MODEL for sample in family.samples), family.name


def test_the_other_processes_metrics_are_appended_while_they_live(service: Service) -> None:
    registry = CollectorRegistry()
    Counter("triptych_scheduler_steps_total", "Steps.", registry=registry).inc(5)
    path = f"{service.config.runtime_dir}/scheduler.metrics.sock"
    with serve_metrics(registry, unix_path=path):
        assert metrics_of(service)["triptych_scheduler_steps_total"] == 5
    assert "triptych_scheduler_steps_total" not in metrics_of(service)


def test_a_socket_where_nobody_answers_is_left_out(service: Service, tmp_path: Any) -> None:
    assert fetch(str(tmp_path / "nothing.sock")) == b""
    (tmp_path / "file.sock").write_text("x")
    assert fetch(str(tmp_path / "file.sock")) == b""

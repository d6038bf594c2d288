"""Several API processes in one runtime directory: every one of them speaks for all."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from protocol.exposition import serve_metrics
from services.neighbours import LIVE_PAGE, merged
from tests.services.service_kit import MODEL, MakeService, Service

ENDS = (b"{", b"_bucket{", b"_count{", b"_sum{")
Sample = tuple[str, tuple[tuple[str, str], ...], float]


def samples(text: bytes) -> list[Sample]:
    """All samples, read by the official parser."""
    return sorted(
        (sample.name, tuple(sorted(sample.labels.items())), sample.value)
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    )


def text_of(count: float) -> bytes:
    registry = CollectorRegistry()
    Counter("plain_total", "No labels.", registry=registry).inc(count)
    Gauge("size_bytes", "No labels either.", registry=registry).set(count)
    odd = Counter("odd_total", 'A "help" with {braces}.', ["path"], registry=registry)
    odd.labels('a "b" {c} d').inc(count)
    Histogram("seconds", "Buckets.", buckets=(1, 2), registry=registry).observe(count)
    return generate_latest(registry)


def test_merged_texts_keep_every_sample_with_its_process() -> None:
    both = merged({"1": text_of(1), "2": text_of(5)})
    expected = [
        (name, tuple(sorted([*labels, ("process", process)])), value)
        for process, text in (("1", text_of(1)), ("2", text_of(5)))
        for name, labels, value in samples(text)
    ]
    assert samples(both) == sorted(expected)


def test_a_family_has_one_head_and_its_samples_stand_together() -> None:
    lines = merged({"1": text_of(1), "2": text_of(5)}).splitlines()
    for name in (b"plain_total", b"size_bytes", b"odd_total", b"seconds"):
        assert [line.split(b" ")[1] for line in lines if line.startswith(b"# ") and line.split(b" ")[2] == name] == [
            b"HELP",
            b"TYPE",
        ]
        own = [number for number, line in enumerate(lines) if line.startswith(tuple(name + end for end in ENDS))]
        assert own == list(range(own[0], own[0] + len(own)))


def test_a_metric_that_only_one_process_has_is_kept() -> None:
    assert samples(merged({"1": b"", "2": b"# TYPE a gauge\na 3\n"})) == [("a", (("process", "2"),), 3.0)]


def test_the_texts_of_several_runners_are_told_apart_by_their_replica(make_service: MakeService) -> None:
    service = make_service()
    servers = []
    try:
        for number in (0, 1, 10):
            registry = CollectorRegistry()
            Gauge("triptych_runner_size", "A size.", registry=registry).set(number)
            path = f"{service.config.runtime_dir}/runner-{number}.metrics.sock"
            servers.append(serve_metrics(registry, unix_path=path))
        families = text_string_to_metric_families(service.http.get("/metrics").text)
        found = {s.labels["replica"]: s.value for f in families for s in f.samples if s.name == "triptych_runner_size"}
        assert found == {"0": 0, "1": 1, "10": 10}
    finally:
        for server in servers:
            server.close()
        service.close()


@pytest.fixture
def first(make_service: MakeService) -> Iterator[Service]:
    """The first of several API processes; the others are what a test puts into its runtime directory."""
    service = make_service(process_number=1)
    yield service
    service.close()


def second(service: Service, live: int, answered: float) -> Any:
    """A neighbour's private socket."""
    registry = CollectorRegistry()
    counter = Counter(
        "triptych_api_requests_total", "Requests.", ["model_name", "endpoint", "status"], registry=registry
    )
    counter.labels(MODEL, "/load", "200").inc(answered)
    path = f"{service.config.runtime_dir}/api-2.metrics.sock"
    return serve_metrics(registry, unix_path=path, pages={LIVE_PAGE: lambda _: b"%d" % live})


def requests_by_process(service: Service) -> dict[str, float]:
    families = text_string_to_metric_families(service.http.get("/metrics").text)
    return {
        sample.labels["process"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "triptych_api_requests_total" and sample.labels["endpoint"] == "/load"
    }


def test_metrics_show_each_process_and_one_that_is_gone_no_more(first: Service) -> None:
    first.http.get("/load")
    with second(first, live=7, answered=41):
        assert requests_by_process(first) == {"1": 1, "2": 41}
    assert requests_by_process(first) == {"1": 1}


def test_the_load_is_that_of_all_processes(first: Service) -> None:
    def load() -> dict[str, Any]:
        answer: dict[str, Any] = first.http.get("/load").json()
        return answer

    with second(first, live=7, answered=0):
        assert (load()["server_load"], load()["by_process"]) == (7, {"1": 0, "2": 7})
    assert (load()["server_load"], load()["by_process"]) == (0, {"1": 0})


def test_a_neighbour_that_hangs_is_left_out_of_both(first: Service) -> None:
    path = f"{first.config.runtime_dir}/api-2.metrics.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as hung:
        hung.bind(path)
        hung.listen()
        assert first.http.get("/load").json()["by_process"] == {"1": 0}
        assert requests_by_process(first) == {"1": 1}


def test_a_process_that_is_alone_has_no_label(service: Service) -> None:
    assert service.http.get("/load").json()["by_process"] == {}
    assert "process=" not in service.http.get("/metrics").text


def test_request_ids_of_neighbours_never_meet(make_service: MakeService) -> None:
    for number in (1, 255):
        service = make_service(process_number=number)
        assert service.scheduler is not None
        engine = service.state.engine
        engine._next_id = (1 << 56) - 1  # the counter's last
        for _ in range(3):
            service.http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 1})
        ids = [submit.id for submit in service.scheduler.record.submits]
        assert [one >> 56 for one in ids] == [number] * 3 and len(set(ids)) == 3
        service.close()

"""What the API's tests share: the real model's tokenizer and running services."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.config import ApiConfig
from services.text.tokenizer import Tokenizer, load_tokenizer
from tests.services.service_kit import MakeService, Service


@pytest.fixture(scope="session")
def smollm2(real_model_path: Path) -> Tokenizer:
    """The small real model's tokenizer."""
    return load_tokenizer(real_model_path)


@pytest.fixture(scope="module")
def running_services() -> Iterator[list[Service]]:
    """The services that a file's tests have started. They end with the file: an idle one still costs its processor."""
    running: list[Service] = []
    yield running
    for service in running:
        service.close()


@pytest.fixture(autouse=True)
def _end_what_the_test_started(running_services: list[Service]) -> Iterator[None]:
    """What the file's own fixtures have started stays."""
    before = len(running_services)
    yield
    for service in running_services[before:]:
        service.close()
    del running_services[before:]


@pytest.fixture(scope="module")
def make_service(
    smollm2: Tokenizer,
    real_model_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    running_services: list[Service],
) -> MakeService:
    """Start API services with other settings; what a test leaves running ends with the test."""

    def make(*, keys: Sequence[str] = (), scheduler: bool = True, **settings: Any) -> Service:
        directory = tmp_path_factory.mktemp("run")
        directory.chmod(0o700)
        base = ApiConfig(model=str(real_model_path), port=0, runtime_dir=str(directory), log_interval_s=0.0)
        service = Service(replace(base, **settings), smollm2, list(keys), scheduler=scheduler)
        running_services.append(service)
        return service

    return make


@pytest.fixture(scope="module")
def shared_service(make_service: MakeService) -> Service:
    """One service for all tests of a file that don't need their own."""
    return make_service()


@pytest.fixture
def service(shared_service: Service) -> Iterator[Service]:
    """The shared service, its scheduler as new."""
    shared_service.reset()
    yield shared_service
    shared_service.reset()

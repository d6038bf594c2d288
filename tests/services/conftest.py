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


@pytest.fixture(scope="session")
def make_service(
    smollm2: Tokenizer, real_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeService]:
    """Start API services with other settings; what a test leaves running ends with the session."""
    started: list[Service] = []

    def make(*, keys: Sequence[str] = (), scheduler: bool = True, **settings: Any) -> Service:
        directory = tmp_path_factory.mktemp("run")
        directory.chmod(0o700)
        base = ApiConfig(model=str(real_model_path), port=0, runtime_dir=str(directory), log_interval_s=0.0)
        service = Service(replace(base, **settings), smollm2, list(keys), scheduler=scheduler)
        started.append(service)
        return service

    yield make
    for service in started:
        service.close()


@pytest.fixture(scope="session")
def shared_service(make_service: MakeService) -> Service:
    """One service for all tests that don't need their own."""
    return make_service()


@pytest.fixture
def service(shared_service: Service) -> Iterator[Service]:
    """The shared service, its scheduler as new."""
    shared_service.reset()
    yield shared_service
    shared_service.reset()

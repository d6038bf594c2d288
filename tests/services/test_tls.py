"""HTTPS: the same server behind a certificate, and clear words about files that can't be used."""

from __future__ import annotations

import ssl
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import trustme

from ops.serve import is_ready
from services.config import ApiConfig
from services.tls import TlsError, server_context
from tests.services.service_kit import MODEL, MakeService, stream_lines

HEALTH_CHECK = Path(__file__).parent.parent.parent / "ops" / "docker" / "healthcheck.py"


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `localhost.crt` (and the authority that signed it), `localhost.key`, and the key of another."""
    directory = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued, other = (authority.issue_cert("localhost", "127.0.0.1") for _ in range(2))
    chain = [*issued.cert_chain_pems, authority.cert_pem]
    (directory / "localhost.crt").write_bytes(b"".join(pem.bytes() for pem in chain))
    (directory / "localhost.key").write_bytes(issued.private_key_pem.bytes())
    (directory / "other.key").write_bytes(other.private_key_pem.bytes())
    return directory


@pytest.fixture(scope="module")
def certificate(tls: Path) -> str:
    return str(tls / "localhost.crt")


@pytest.fixture(scope="module")
def key(tls: Path) -> str:
    return str(tls / "localhost.key")


def test_whole_answers_and_streams_come_over_tls_and_plain_http_does_not(
    make_service: MakeService, certificate: str, key: str
) -> None:
    service = make_service(ssl_certfile=certificate, ssl_keyfile=key)
    assert service.address.startswith("https://")
    assert service.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}).status_code == 200
    assert stream_lines(service, "/v1/completions", {"prompt": "x"})[-1] == "[DONE]"
    with pytest.raises(httpx.TransportError):
        httpx.get(service.address.replace("https", "http") + "/health")
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(service.address + "/health")
    port = int(service.address.rpartition(":")[2])
    assert is_ready(replace(service.config, port=port))
    health = [sys.executable, "-IS", str(HEALTH_CHECK), "api"]
    environment = {"TRIPTYCH_PORT": str(port), "TRIPTYCH_SSL_CERTFILE": certificate}
    assert subprocess.run(health, env=environment, check=False, timeout=60).returncode == 0
    service.close()


def test_a_client_that_leaves_a_stream_over_tls_ends_its_request(
    make_service: MakeService, certificate: str, key: str
) -> None:
    service = make_service(ssl_certfile=certificate, ssl_keyfile=key)
    scheduler = service.scheduler
    assert scheduler is not None
    scheduler.tokens_allowed = 2
    with service.http.stream("POST", "/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True}) as answer:
        next(answer.iter_text())
    scheduler.wait_for(lambda: bool(scheduler.record.aborted), "the abort")
    service.close()


def test_certificate_and_key_may_be_in_one_file(tmp_path: Path, certificate: str, key: str) -> None:
    both = tmp_path / "both.pem"
    both.write_text(Path(certificate).read_text() + Path(key).read_text())
    assert isinstance(server_context(ApiConfig(ssl_certfile=str(both))), ssl.SSLContext)
    assert server_context(ApiConfig()) is None


@pytest.mark.parametrize(
    ("cert_name", "key_name", "why"),
    [
        ("/no/such.crt", "localhost.key", "ssl_certfile: /no/such.crt can't be read: No such file"),
        ("localhost.crt", "/no/such.key", "ssl_keyfile: /no/such.key can't be read: No such file"),
        ("localhost.crt", "other.key", "the key in .*other.key is not that of the certificate in .*localhost.crt"),
        ("localhost.crt", "", "localhost.crt and .*localhost.crt can't be used"),
        ("localhost.key", "localhost.crt", "can't be used"),
        (__file__, __file__, "can't be used"),
        ("", "localhost.key", "ssl_keyfile needs ssl_certfile"),
    ],
)
def test_files_that_can_not_be_used_are_named_with_the_reason(
    tls: Path, cert_name: str, key_name: str, why: str
) -> None:
    def named(name: str) -> str:
        return str(tls / name) if name else ""

    with pytest.raises(TlsError, match=why):
        server_context(ApiConfig(ssl_certfile=named(cert_name), ssl_keyfile=named(key_name)))

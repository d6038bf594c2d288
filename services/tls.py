"""TLS for the HTTP port: the server's certificate and its key, from files."""

from __future__ import annotations

import ssl

from services.config import ApiConfig


class TlsError(ValueError):
    """The files can't be used; says which and why."""


def server_context(config: ApiConfig) -> ssl.SSLContext | None:
    """What `ssl_certfile` and `ssl_keyfile` make; None without them. Raises TlsError."""
    if not config.ssl_certfile:
        if config.ssl_keyfile:
            raise TlsError("ssl_keyfile needs ssl_certfile, the certificate that belongs to it")
        return None
    for name in ("ssl_certfile", "ssl_keyfile"):
        path = getattr(config, name)
        if path:
            try:
                with open(path, "rb"):
                    pass
            except OSError as error:
                raise TlsError(f"{name}: {path} can't be read: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile or None, _no_password)
    except ssl.SSLError as error:
        raise TlsError(_reason(config, error)) from None
    return context


def _no_password() -> str:
    """For a key with a password, instead of a question on the terminal. Keys here have none."""
    return ""


def _reason(config: ApiConfig, error: ssl.SSLError) -> str:
    key = config.ssl_keyfile or config.ssl_certfile
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"ssl_keyfile: the key in {key} is not that of the certificate in {config.ssl_certfile}"
    why = (error.reason or "no certificate and key in PEM format").lower().replace("_", " ")
    return f"ssl_certfile, ssl_keyfile: {config.ssl_certfile} and {key} can't be used: {why}"

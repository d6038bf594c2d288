"""The API process from its configuration to its exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import os

import uvloop

from protocol.channels import AddressError
from protocol.exposition import ExpositionError, serve_metrics
from protocol.process import (
    PrivateDirError,
    StopSignal,
    Watchdog,
    die_with_parent,
    ensure_private_dir,
    setup_logging,
)
from services.config import ApiConfig
from services.keys import KeyFileError, Keyring
from services.listen import BindError, listen
from services.neighbours import LIVE_PAGE, READY_PAGE
from services.responses.shelf import PAGE as RESPONSE_PAGE
from services.server import ApiServer
from services.text.chat_template import ChatTemplate, TemplateError
from services.text.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from services.tls import TlsError

log = logging.getLogger("triptych.api")

EXPECTED = (
    BindError,
    AddressError,
    ExpositionError,
    PrivateDirError,
    TokenizerError,
    TemplateError,
    KeyFileError,
    TlsError,
)
"""What a start fails with when a setting is wrong: their text says all."""

GC_THRESHOLD = 20_000
"""Objects made since the last collection that start the next one."""


def run(config: ApiConfig) -> int:
    """Serve until SIGTERM or SIGINT. Returns 0 after an orderly end, 1 if it can't start or can't go on.

    A second signal ends the process at once.
    """
    setup_logging("api", config.log_level)
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
    die_with_parent()
    watchdog = Watchdog.from_environment()
    with StopSignal() as stop:
        try:
            ensure_private_dir(config.runtime_dir)
            listener = listen(config)
            tokenizer = load_tokenizer(config.model)
            template = load_template(config, tokenizer)
            keyring = Keyring(config.api_key, config.admin_key, config.api_key_file)
            server = ApiServer(config, tokenizer, template, keyring)
            exposition = serve_metrics(
                server.registry,
                unix_path=config.metrics_socket,
                host=config.metrics_host,
                port=config.metrics_port,
                pages={
                    LIVE_PAGE: lambda _: b"%d" % server.state.engine.num_live(),
                    RESPONSE_PAGE: server.state.responses.page,
                    READY_PAGE: lambda _: b"%d" % server.state.engine.chain.ready,
                },
            )
        except EXPECTED as error:
            log.error("can't start: %s", error)
            return 1
        except (OSError, ValueError) as error:
            log.error("can't start: %s: %s", type(error).__name__, error)
            return 1
        address = listener.getsockname()
        scheme = "https" if config.ssl_certfile else "http"
        where = address if isinstance(address, str) else "{}://{}:{}".format(scheme, *address[:2])
        log.info("pid %d serves %s on %s", os.getpid(), config.served_model_name, where)
        local = config.host in ("127.0.0.1", "localhost", "::1") or bool(config.uds)
        if not local and not keyring:
            log.warning("open to everyone who reaches %s: no API key is configured", where)
        # What is loaded by now stays, and requests leave no cycles: collections need not look at the one again, nor at
        # thousands of connections every few hundred objects.
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        try:
            with exposition, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(server.run(listener, stop, beat=watchdog.beat))
        finally:
            if config.uds and config.listen_fd < 0 and os.path.exists(config.uds):
                os.unlink(config.uds)


def load_template(config: ApiConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The configured chat template, else the model's own. Raises OSError or TemplateError."""
    if not config.chat_template:
        return ChatTemplate.of(tokenizer)
    with open(config.chat_template, encoding="utf-8") as file:
        return ChatTemplate(file.read(), special_tokens=tokenizer.special_tokens)

"""What all routes share in one API process. Assembled in `services.app`, owned by nobody else."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.types import Receive, Scope

from services.bodies import read_json_body
from services.config import ApiConfig
from services.engine import Engine
from services.errors import ApiError
from services.grammar_checker import GrammarChecker
from services.metrics import ApiMetrics
from services.neighbours import Neighbours
from services.record import Recording
from services.responses.shelf import Shelf
from services.sampling import Defaults
from services.textpool import TextPool
from services.tools.dialect import Dialect

log = logging.getLogger("triptych.api")

MAX_NAMED_FIELDS = 1000


@dataclass(slots=True)
class ApiState:
    """One API process: settings, the engine client, text, metrics, and whether it still takes requests."""

    config: ApiConfig
    engine: Engine
    text: TextPool
    metrics: ApiMetrics
    neighbours: Neighbours
    responses: Shelf
    defaults: Defaults
    dialect: Dialect
    recording: Recording | None = None
    draining: bool = False
    grammars: GrammarChecker = field(default_factory=GrammarChecker)
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    started: int = field(default_factory=lambda: int(time.time()))
    named_fields: set[str] = field(default_factory=set)

    @property
    def model(self) -> str:
        """The name that answers carry."""
        return self.config.served_model_name

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All ids that end an answer: what the tokenizer's files say and what the runner says."""
        limits = self.engine.chain.limits
        return tuple(dict.fromkeys([*self.text.tokenizer.eos_token_ids, *(limits.eos_token_ids if limits else ())]))

    async def read_body(self, scope: Scope, receive: Receive) -> bytes:
        """A JSON request's body within the configured limits."""
        return await read_json_body(scope, receive, self.config.max_body_bytes, self.config.body_timeout_s)

    def check_model(self, name: str | None) -> None:
        """ApiError 404 for a model that isn't served. Absent means the one that is; "" is a name like any other."""
        served = (self.config.served_model_name, *self.config.model_alias)
        if name is None or name in served or self.config.accept_any_model:
            return
        raise ApiError(
            404,
            f"model: {name[:200]!r} does not exist; served: {', '.join(served)}",
            code="model_not_found",
            param="model",
        )

    def note_unknown(self, fields: list[str], ignored: list[str]) -> None:
        """Count ignored fields, name each one once in the log, and add them to what the answer names."""
        if not fields:
            return
        ignored += fields
        self.metrics.unknown_fields.inc(len(fields))
        for name in fields:
            if name not in self.named_fields and len(self.named_fields) < MAX_NAMED_FIELDS:
                self.named_fields.add(name)
                log.warning("ignored the unknown field %r in a request body", name[:100])

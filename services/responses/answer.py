"""One response: what was asked for, how far its answer has come, and how that reads as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.errors import ApiError, printable
from services.formats import Usage
from services.responses.events import EventLog
from services.responses.items import JsonItem
from services.responses.schema import ResponsesRequest

IN_PROGRESS = "in_progress"
_REASONS = {"length": "max_output_tokens", "repetition": "repetition_detected"}


@dataclass(slots=True)
class Response:
    """A response from its acceptance on. `items` is the conversation up to it, earlier responses included."""

    id: str
    tenant: str
    created: int
    model: str
    temperature: float
    top_p: float
    request: ResponsesRequest
    items: list[JsonItem]
    kept: bool
    status: str = IN_PROGRESS
    output: list[JsonItem] = field(default_factory=list)
    usage: Usage | None = None
    error: dict[str, str] | None = None
    incomplete: str | None = None
    abort: Callable[[], None] = lambda: None
    log: EventLog | None = None
    """Its events, if it runs in the background and is streamed."""

    @property
    def over(self) -> bool:
        """Whether nothing will be added."""
        return self.status != IN_PROGRESS

    @property
    def background(self) -> bool:
        """Whether it goes on without its client."""
        return bool(self.request.background)

    def finish(self, reason: str, usage: Usage) -> None:
        """The answer is complete, or cut for a `reason`."""
        self.usage = usage
        self.incomplete = _REASONS.get(reason)
        self.status = "incomplete" if self.incomplete else "completed"

    def fail(self, error: ApiError) -> None:
        """It broke. Does nothing to a response that is over."""
        if not self.over:
            self.error = {"code": error.code or "server_error", "message": printable(error.message)}
            self.status = "failed"

    def cancel(self) -> None:
        """Nobody wants it any more. Does nothing to a response that is over."""
        if not self.over:
            self.status = "cancelled"
            self.abort()

    def payload(self) -> dict[str, Any]:
        """OpenAI's response object."""
        asked = self.request
        text: dict[str, Any] = {"format": {"type": "text"}}
        if asked.text is not None and asked.text.format is not None:
            chosen = asked.text.format
            text["format"] = {
                name: value for name in chosen.__struct_fields__ if (value := getattr(chosen, name)) is not None
            }
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": self.status,
            "background": self.background,
            "error": self.error,
            "incomplete_details": {"reason": self.incomplete} if self.incomplete else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": asked.max_tool_calls,
            "metadata": asked.metadata or {},
            "model": self.model,
            "output": self.output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "prompt_cache_key": asked.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None, **(asked.reasoning or {})},
            "safety_identifier": asked.safety_identifier,
            "service_tier": "default",
            "store": self.kept,
            "temperature": self.temperature,
            "text": text,
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": self.top_p,
            "truncation": asked.truncation or "disabled",
            "usage": None if self.usage is None else _usage(self.usage),
            "user": asked.user,
        }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }

"""Request bodies: their fields, how JSON becomes them, and what is said when it can't.

Ranges that depend on the model (token ids, lengths) are checked in `services.sampling`; here only types and shapes.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal, TypeVar

import msgspec

from services.errors import ApiError, invalid, unsupported

_MISSING = re.compile(r"Object missing required field `(\w+)`")
_PATH = re.compile(r" - at `\$\.?([^`]*)`$")


class StreamOptions(msgspec.Struct):
    """What a stream carries beside the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class RepetitionDetection(msgspec.Struct):
    """When outputs that repeat a pattern end the answer. A maximum of 0 switches it off."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


FormatType = Literal["text", "json_object", "json_schema"]
"""What `response_format` can be; the last one comes with a schema."""


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The schema of a `response_format`. It is always kept to the letter, whatever `strict` says."""

    schema: dict[str, Any] | bool | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's field. A key that isn't known is an error: it could be a schema in the wrong place."""

    type: FormatType
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's field: one of these."""

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Sampling(msgspec.Struct, kw_only=True):
    """Fields that both endpoints share. Null means absent."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: list[int] | None = None
    repetition_detection: RepetitionDetection | None = None
    timeout: float | None = None
    deadline: float | None = None
    routing_key: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    ebnf: str | None = None


class CompletionRequest(Sampling, kw_only=True):
    """POST /v1/completions."""

    prompt: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None


class ContentPart(msgspec.Struct):
    """One part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Message(msgspec.Struct, omit_defaults=True):
    """One chat message. Roles are the template's business."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    function_call: dict[str, Any] | None = None
    refusal: str | None = None
    audio: dict[str, Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatRequest(Sampling, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool | None = None


# Fields that clients send and that change nothing here.
IGNORED = frozenset(
    "metadata store service_tier parallel_tool_calls reasoning_effort safety_identifier prompt_cache_key "
    "prompt_cache_retention prompt_cache_options prediction cache_control context_management betas verbosity "
    "truncation_side request_id include_reasoning guided_decoding_backend".split()
)


class Neutral:
    """The values that leave a field off: these and null, told apart as JSON does (`true` is not 1)."""

    def __init__(self, *allowed: Any) -> None:
        self.allowed = (None, *allowed)

    def __call__(self, value: Any) -> bool:
        """Whether the field changes nothing with this value."""
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.allowed)


_absent = Neutral(False, 0, "", [], {})
_one_of = Neutral


# Known features this server doesn't have: the values that leave them off are accepted, all others are an error.
UNSUPPORTED: dict[str, Neutral] = {
    "suffix": _absent,
    "tools": _absent,
    "tool_choice": _one_of("none", "auto"),
    "functions": _absent,
    "function_call": _one_of("none", "auto"),
    "guided_json_object": _absent,
    "guided_whitespace_pattern": _absent,
    "structural_tag": _absent,
    "prompt_embeds": _absent,
    "logits_processors": _absent,
    "bad_words": _absent,
    "use_beam_search": _absent,
    "length_penalty": _one_of(1, 0),
    "spaces_between_special_tokens": _one_of(True),
    "return_tokens_as_token_ids": _absent,
    "chat_template": _absent,
    "documents": _absent,
    "modalities": _one_of(["text"]),
    "audio": _absent,
    "moderation": _absent,
    "mcp_servers": _absent,
    "container": _absent,
    "web_search_options": _absent,
    "mm_processor_kwargs": _absent,
    "kv_transfer_params": _absent,
    "logprob_token_ids": _absent,
    "lora_request": _absent,
}

R = TypeVar("R", bound=msgspec.Struct)


def decode(body: bytes, kind: type[R]) -> tuple[R, list[str]]:
    """The body as `kind`, and the names of its unknown fields. Raises ApiError 400 naming what is wrong and where."""
    try:
        body.decode()  # fields that are kept raw or skipped are not looked at otherwise
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        request = msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise _explain(error, body) from error
    known = set(kind.__struct_fields__)
    unknown: list[str] = []
    for name, raw in fields.items():
        if name in known or name in IGNORED:
            continue
        neutral = UNSUPPORTED.get(name)
        if neutral is None:
            unknown.append(name)
        elif not neutral(msgspec.json.decode(raw)):
            raise unsupported(name)
    return request, unknown


def decode_field(raw: msgspec.Raw, kind: Any, param: str) -> Any:
    """A field kept as raw JSON, as `kind`. Raises ApiError 400 with the full path."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        message, path = _split(error)
        raise invalid(f"{param}{path}: {message}", param) from error


def _split(error: Exception) -> tuple[str, str]:
    text = str(error)
    found = _PATH.search(text)
    message, path = (text[: found.start()], found.group(1)) if found else (text, "")
    if missing := _MISSING.fullmatch(message):
        return "required", f"{path}.{missing[1]}" if path else missing[1]
    return message, path


def _explain(error: Exception, body: bytes) -> ApiError:
    if isinstance(error, RecursionError):
        return invalid("The body is nested too deeply", code="invalid_json")
    if isinstance(error, msgspec.ValidationError):
        message, path = _split(error)
        param = re.split(r"[.\[]", path)[0] or None
        code = {"code": "missing"} if message == "required" else {}
        return invalid(f"{path}: {message}" if path else f"The body: {message}", param, **code)
    if isinstance(error, UnicodeDecodeError):
        return invalid(f"The body is not valid UTF-8 (byte {error.start})", code="invalid_json")
    if not body.strip():
        return invalid("The body is empty, expected a JSON object", code="invalid_json")
    field = _lone_surrogate(body)
    if field is not None:
        return invalid(f"{field}: a lone surrogate escape is not text", re.split(r"[.\[]", field)[0], "invalid_unicode")
    return invalid(f"The body is not valid JSON: {error}", code="invalid_json")


def _lone_surrogate(body: bytes) -> str | None:
    """The path of the first string with half of a surrogate pair. msgspec refuses those without saying where."""
    if b"\\u" not in body:
        return None
    try:
        return _find_surrogate(json.loads(body), "")
    except (ValueError, RecursionError):
        return None


def _find_surrogate(value: Any, path: str) -> str | None:
    if isinstance(value, str):
        return path if any("\ud800" <= character <= "\udfff" for character in value) else None
    if isinstance(value, dict):
        for key, item in value.items():
            inner = f"{path}.{key}" if path else key
            if _find_surrogate(key, "key") is not None:
                return path or "a field's name"
            if (found := _find_surrogate(item, inner)) is not None:
                return found
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if (found := _find_surrogate(item, f"{path}[{index}]")) is not None:
                return found
    return None

"""What the routes answer, as types: only for the description. Who builds an answer (`formats`) doesn't use them.

A field that is UNSET by default is not always there.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class ErrorDetail(msgspec.Struct):
    """What is wrong: in words, of which kind, in which field, and a code for programs."""

    message: str
    type: str
    param: str | None
    code: str


class Error(msgspec.Struct):
    """OpenAI's error."""

    error: ErrorDetail


class AnthropicErrorDetail(msgspec.Struct):
    """What is wrong; `details` where clients act on them."""

    type: str
    message: str
    details: dict[str, str] | UnsetType = UNSET


class AnthropicError(msgspec.Struct):
    """Anthropic's error."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


# --- completions and chat ------------------------------------------------------------------------------------


class PromptTokensDetails(msgspec.Struct):
    """How many prompt tokens came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """How many tokens were thoughts."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


FinishReason = Literal["stop", "length", "repetition", "tool_calls", "function_call"]


class PromptLogprob(msgspec.Struct):
    """A token at its place in the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id, the prompt's own and the likeliest; null for the first place."""


class CompletionLogprobs(msgspec.Struct):
    """Of each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct):
    """One completion; in a stream, what is new in it. Only the last event of a choice has a finish reason."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct):
    """The answer of /v1/completions, and each event of its stream; there `usage` is absent or null but at the end."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class CalledFunction(msgspec.Struct):
    """What is called. In a stream the name comes once, the arguments in pieces."""

    arguments: str
    name: str | UnsetType = UNSET


class CalledTool(msgspec.Struct):
    """A custom tool that is called, and the text that it gets."""

    input: str
    name: str | UnsetType = UNSET


class ToolCall(msgspec.Struct):
    """A call, of a function or a custom tool; in a stream with its index, and with id and type once."""

    function: CalledFunction | UnsetType = UNSET
    custom: CalledTool | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    index: int | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    """A token, its log-probability and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The sampled token and its alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Of each token of the content."""

    content: list[TokenLogprob]
    refusal: None


class ChatMessage(msgspec.Struct):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    """What is new in a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET


class _ChatAnyChoice(msgspec.Struct, kw_only=True):
    index: int
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChoice(_ChatAnyChoice, kw_only=True):
    """One message."""

    message: ChatMessage


class ChatChunkChoice(_ChatAnyChoice, kw_only=True):
    """What is new in one message."""

    delta: ChatDelta


class ChatCompletion(msgspec.Struct):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct):
    """An event of its stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


# --- messages ------------------------------------------------------------------------------------------------


class AnthropicUsage(msgspec.Struct):
    """Token counts; those from the prefix cache are not among the input tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int] | UnsetType = UNSET


class TextBlock(msgspec.Struct, tag="text"):
    """Text."""

    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    """Thoughts."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    """A call."""

    id: str
    name: str
    input: dict[str, Any]


class AnthropicMessage(msgspec.Struct):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(msgspec.Struct):
    """Tokens of the prompt."""

    input_tokens: int


# --- the others ----------------------------------------------------------------------------------------------


class Model(msgspec.Struct):
    """A served name. The context's length is null until a scheduler has said it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None


class Models(msgspec.Struct):
    """All served names."""

    object: Literal["list"]
    data: list[Model]


class Tokenized(msgspec.Struct):
    """The ids, and on request how the vocabulary spells them."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    """The text."""

    prompt: str


class Health(msgspec.Struct):
    """How the chain behind this process does; of several runners, how many are up."""

    status: Literal["ok", "unhealthy", "ready", "not ready"]
    reason: str | None
    replicas: int | UnsetType = UNSET
    replicas_up: int | UnsetType = UNSET


class Version(msgspec.Struct):
    """The program's version, and that of the protocol between its processes."""

    version: str
    protocol: int
    schema: str


class Load(msgspec.Struct):
    """Requests in the API processes; running and waiting in the scheduler, null if none reports."""

    server_load: int
    by_process: dict[str, int]
    running: int | None
    waiting: int | None
    kv_usage: float | None


class TimelineEvent(msgspec.Struct):
    """One thing that happened; which other fields it has depends on what."""

    ms: float
    event: str


class Timeline(msgspec.Struct):
    """What happened to a request in the scheduler; it says more than this."""

    id: str
    label: str
    tenant: str
    status: str
    events: list[TimelineEvent]


ANSWERS: tuple[type[msgspec.Struct], ...] = (
    Error,
    AnthropicError,
    Completion,
    ChatCompletion,
    ChatCompletionChunk,
    AnthropicMessage,
    TokenCount,
    Model,
    Models,
    Tokenized,
    Detokenized,
    Health,
    Version,
    Load,
    Timeline,
)

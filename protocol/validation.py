"""What no scheduler can serve under a runner's limits, with the numbers. (The API checks too: trust nobody.)"""

from __future__ import annotations

from protocol.columns import i32
from protocol.messages import Limits, Rejected, Submit

MAX_PRIORITY = (1 << 31) - 1
MAX_NAME = 1024
"""Characters of a name that requests are grouped by, such as a cache salt."""
MAX_GENERATION = (1 << 63) - 1


def check_submit(submit: Submit, limits: Limits, known: bool) -> Rejected | None:
    """The rejection for a request that can never run, or None. `known`: a live request has this id already."""

    def refuse(code: str, message: str, param: str) -> Rejected:
        return Rejected(submit.id, code, message, 400, 0, param)

    if not 0 <= submit.id < 1 << 64:
        return refuse("invalid_id", f"id is {submit.id}; ids are unsigned 64-bit integers", "id")
    if known:
        return Rejected(submit.id, "duplicate_id", f"a request with id {submit.id} is live already", 409, 0, "id")
    if len(submit.prompt) % 4 or len(submit.emitted) % 4:
        return refuse("invalid_tokens", "token columns are not whole 32-bit integers", "prompt")
    if submit.open and submit.emitted:
        return refuse("invalid_open", "a request that has outputs can't have more of its prompt to come", "open")
    if submit.open and submit.params.prompt_logprobs >= 0:
        return refuse("invalid_open", "a prompt that comes in parts has no prompt_logprobs", "prompt_logprobs")
    if abs(submit.priority) > MAX_PRIORITY:
        text = f"priority is {submit.priority}; it goes from {-MAX_PRIORITY} to {MAX_PRIORITY}"
        return refuse("invalid_priority", text, "priority")
    for name, text in (("cache_salt", submit.cache_salt), ("adapter", submit.adapter)):
        if len(text) > MAX_NAME:
            return refuse(f"invalid_{name}", f"{name} has {len(text)} characters, at most {MAX_NAME} are allowed", name)
    generation = submit.adapter_generation
    if not 0 <= generation <= MAX_GENERATION or (generation and not submit.adapter):
        text = f"adapter_generation is {generation}; it goes from 0 to {MAX_GENERATION}, and is 0 without an adapter"
        return refuse("invalid_adapter_generation", text, "adapter_generation")
    params = submit.params
    if params.repetition_max_pattern > 0 and params.repetition_min_count < 2:
        text = f"repetition_min_count is {params.repetition_min_count}; one copy of a pattern repeats nothing"
        return refuse("invalid_repetition", text, "repetition_min_count")
    num_prompt = len(submit.prompt) >> 2
    if num_prompt == 0:
        return refuse("empty_prompt", "the prompt has no tokens", "prompt")
    if submit.params.max_tokens < 1:
        text = f"max_tokens is {submit.params.max_tokens}, at least 1 is needed"
        return refuse("invalid_max_tokens", text, "max_tokens")
    if num_prompt >= limits.max_model_len:
        return refuse(
            "context_length_exceeded",
            f"the prompt has {num_prompt} tokens; with one output it exceeds the context of {limits.max_model_len}",
            "prompt",
        )
    capacity = (limits.num_blocks - 1) * limits.block_size
    if num_prompt > capacity:
        return refuse(
            "kv_capacity_exceeded",
            f"the prompt has {num_prompt} tokens; the KV pool holds {capacity} "
            f"({limits.num_blocks - 1} blocks of {limits.block_size})",
            "prompt",
        )
    for name, column in (("prompt", submit.prompt), ("emitted", submit.emitted)):
        wrong = wrong_token(column, limits)
        if wrong:
            return refuse("invalid_token_id", name + wrong, "prompt")
    return None


def wrong_token(column: bytes, limits: Limits) -> str:
    """What is wrong with the ids of an i32 column, as "[index] is …"; empty if nothing is."""
    tokens = i32(column)
    outside = (tokens < 0) | (tokens >= limits.vocab_size)
    if not outside.any():
        return ""
    index = int(outside.argmax())
    return f"[{index}] is {int(tokens[index])}; ids go from 0 to {limits.vocab_size - 1}"

"""From a request's fields to SamplingParams: defaults, ranges, and how much room the model leaves.

Precedence of defaults: request, then the model's generation_config.json, then OpenAI's.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.messages import Limits, SamplingParams
from services.errors import ApiError, invalid
from services.ranges import MAX_ID_LIST, MAX_PATTERN, MAX_STOP_LENGTH, MAX_STOPS, ranged, within
from services.schema import RepetitionDetection, Sampling

log = logging.getLogger("triptych.api")

GREEDY_BELOW = 0.01
_CONTEXT = "This model's maximum context length is"  # clients look for these words and for "prompt is too long"


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a request gets that doesn't say."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def load_defaults(model: str) -> Defaults:
    """Defaults from `generation_config.json` beside a Hugging Face model, else OpenAI's. A bad value is left out."""
    path = Path(model) / "generation_config.json"
    if not path.is_file():
        return Defaults()
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        log.warning("%s can't be read, OpenAI's sampling defaults are used: %s", path, error)
        return Defaults()
    values: dict[str, Any] = {}
    for name, low, high in (
        ("temperature", 0.0, 2.0),
        ("top_p", 1e-9, 1.0),
        ("top_k", 0, math.inf),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", 1e-9, 10.0),
    ):
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            log.warning("%s: %s = %r is ignored", path, name, value)
            continue
        values[name] = int(value) if name == "top_k" else float(value)
    if values:
        log.info("sampling defaults from %s: %s", path.name, values)
    return Defaults(**values)


def check_ids(ids: list[int], param: str, vocab_size: int) -> None:
    """ApiError 400 naming the first index whose id does not exist."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        index = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise invalid(
            f"{param}[{index}]: token id {ids[index]} is outside [0, {vocab_size - 1}]",
            param.split("[")[0],
            "out_of_range",
        )


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """The `stop` field as a tuple."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise invalid(f"stop: {len(stops)} strings, at most {MAX_STOPS} are allowed", "stop", "out_of_range")
    for text in stops:
        if not text:
            raise invalid("stop: a stop string can't be empty", "stop")
        if len(text) > MAX_STOP_LENGTH:
            raise invalid(
                f"stop: a string of {len(text)} characters, at most {MAX_STOP_LENGTH}", "stop", "out_of_range"
            )
    return stops


def num_choices(request: Sampling, num_prompts: int, max_choices: int) -> int:
    """`n`, checked alone and together with the number of prompts."""
    n: int = within(request.n, 1, "n")
    if n * num_prompts > max_choices:
        raise invalid(
            f"n: {num_prompts} prompts with n={n} make {n * num_prompts} choices, at most {max_choices} are allowed",
            "n",
            "out_of_range",
        )
    return n


def build_params(
    request: Sampling,
    defaults: Defaults,
    limits: Limits,
    eos: tuple[int, ...],
    logprobs: int,
    seed: int,
    grammar: str = "",
) -> SamplingParams:
    """Everything but `max_tokens` and `choice`, which depend on the prompt: those are filled in by `with_room`."""
    vocab = limits.vocab_size
    temperature = within(request.temperature, defaults.temperature, "temperature")
    top_k = within(request.top_k, defaults.top_k, "top_k")
    stop_ids = request.stop_token_ids or []
    allowed = request.allowed_token_ids or []
    if request.allowed_token_ids == []:
        raise invalid("allowed_token_ids: at least one id must be allowed", "allowed_token_ids")
    for name, ids, most in (
        ("stop_token_ids", stop_ids, MAX_ID_LIST),
        ("allowed_token_ids", allowed, vocab),
    ):
        if len(ids) > most:
            raise invalid(f"{name}: {len(ids)} ids, at most {most} are allowed", name, "out_of_range")
        check_ids(ids, name, vocab)
    if logprobs > limits.max_logprobs:
        raise invalid(f"logprobs: {logprobs}, at most {limits.max_logprobs} are allowed", "logprobs", "out_of_range")
    pattern = _repetition(request.repetition_detection)
    return SamplingParams(
        max_tokens=0,
        temperature=float(temperature) if temperature >= GREEDY_BELOW else 0.0,
        top_p=float(within(request.top_p, defaults.top_p, "top_p")),
        top_k=0 if top_k <= 0 else min(top_k, vocab),
        min_p=float(within(request.min_p, defaults.min_p, "min_p")),
        repetition_penalty=float(within(request.repetition_penalty, defaults.repetition_penalty, "repetition_penalty")),
        presence_penalty=float(within(request.presence_penalty, 0.0, "presence_penalty")),
        frequency_penalty=float(within(request.frequency_penalty, 0.0, "frequency_penalty")),
        seed=seed & 0xFFFFFFFFFFFFFFFF,
        min_tokens=ranged(request.min_tokens, 0, "min_tokens", 0, limits.max_model_len),
        ignore_eos=bool(request.ignore_eos),
        eos_token_ids=eos,
        stop_token_ids=tuple(dict.fromkeys(stop_ids)),
        logprobs=logprobs,
        logit_bias=_logit_bias(request.logit_bias, vocab),
        allowed_token_ids=tuple(dict.fromkeys(allowed)),
        repetition_max_pattern=pattern.max_pattern_size,
        repetition_min_pattern=pattern.min_pattern_size,
        repetition_min_count=pattern.min_count,
        grammar=grammar,
    )


def _repetition(asked: RepetitionDetection | None) -> RepetitionDetection:
    """The pattern sizes and count to look for, in vLLM's ranges; a maximum of 0 is off whatever the others say."""
    if asked is None or asked.max_pattern_size == 0:
        return RepetitionDetection(0, 1, 3)
    name = "repetition_detection"
    most = ranged(asked.max_pattern_size, 0, name, 0, MAX_PATTERN)
    least = ranged(asked.min_pattern_size or 1, 1, name, 1, most)
    return RepetitionDetection(most, least, ranged(asked.min_count, 0, name, 2, MAX_PATTERN))


def milliseconds(value: float | None, param: str) -> int:
    """A field in seconds as whole milliseconds, 0 if it is absent; ApiError 400 unless above 0 and at most a week."""
    seconds: float = within(value, 0.0, param)
    return math.ceil(seconds * 1000)


def seed_of(request: Sampling) -> int | None:
    """The request's seed, None if it leaves the choice to the server (absent, null or -1)."""
    seed = within(request.seed, None, "seed")
    return None if seed == -1 else seed


def _logit_bias(bias: dict[str, float] | None, vocab: int) -> tuple[tuple[int, float], ...]:
    entries: dict[int, float] = {}
    if bias and len(bias) > MAX_ID_LIST:
        raise invalid(f"logit_bias: {len(bias)} entries, at most {MAX_ID_LIST}", "logit_bias", "out_of_range")
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid(f"logit_bias: the key {key[:40]!r} is not a token id", "logit_bias")
        token = int(key)
        if token >= vocab:
            raise invalid(f"logit_bias: token id {token} is outside [0, {vocab - 1}]", "logit_bias", "out_of_range")
        entries[token] = float(within(value, 0.0, "logit_bias"))
    return tuple(entries.items())


def capacity(limits: Limits) -> int:
    """Tokens that the KV pool can hold for one request (the null block holds none)."""
    return max(0, (limits.num_blocks - 1) * limits.block_size)


def room(num_prompt: int, limits: Limits, param: str) -> int:
    """The most output tokens that fit after a prompt; at least 1. Raises ApiError 400 if none does.

    The newest token is not in the KV yet, so a prompt may fill the pool and still get its one token.
    """
    field = param.partition("[")[0]
    if num_prompt == 0:
        raise invalid(f"{param}: the prompt has no tokens", field)
    if num_prompt >= limits.max_model_len:
        raise ApiError(
            400,
            f"{_CONTEXT} {limits.max_model_len} tokens, which must hold the prompt and at least one output token. "
            f"{param}: the prompt is too long: {num_prompt} tokens",
            code="context_length_exceeded",
            param=field,
        )
    held = capacity(limits)
    if num_prompt > held:
        raise ApiError(
            400,
            f"{param}: the prompt is too long: {num_prompt} tokens; that exceeds the available context size of {held} "
            f"tokens, the room in the KV cache",
            code="context_length_exceeded",
            param=field,
        )
    return min(limits.max_model_len - num_prompt, held - num_prompt + 1)


def output_limit(
    asked: int | None, default: int | None, num_prompt: int, limits: Limits, param: str, prompt_param: str
) -> int:
    """How many tokens a choice may have: what was asked, else the default, cut to what fits.

    A default is clamped, an explicit number that the context can't hold is a 400 with the numbers. One that only the
    KV pool can't hold is accepted: the answer then ends with "length" when the pool is full.
    """
    free = room(num_prompt, limits, prompt_param)
    if asked is None:
        return free if default is None else min(default, free)
    if asked < 1:
        raise invalid(f"{param}: {asked}, at least 1 is required", param, "out_of_range")
    if num_prompt + asked > limits.max_model_len:
        raise ApiError(
            400,
            f"{_CONTEXT} {limits.max_model_len} tokens. {param}: {num_prompt} prompt tokens and {asked} output tokens "
            f"make {num_prompt + asked}",
            code="context_length_exceeded",
            param=param,
        )
    return asked

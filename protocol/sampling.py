"""How a request samples, and what is reported of probabilities. Parts of messages; `protocol.messages` has them all."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, tag="sampling", array_like=True, frozen=True, gc=False):
    """How one request samples and when it stops. Neutral values switch a feature off.

    `temperature` 0 is greedy. `top_k` 0 means all ids. `seed` is 64-bit and always present: the API draws one for
    a request that brings none. Randomness is a function of (seed, choice, position) and of nothing else.
    `eos_token_ids` is the model's whole end set; `ignore_eos` and `min_tokens` apply to it. `stop_token_ids` still
    stop under `ignore_eos`. `logprobs` is the number of alternatives to report, -1 for no logprobs at all.
    `repetition_max_pattern` > 0 ends a request (status REPETITION) whose outputs end in `repetition_min_count` copies
    of one pattern of `repetition_min_pattern` to `repetition_max_pattern` tokens. `grammar` constrains the output: a
    tagged text (`json_schema:{...}`, `regex:...`, `lark:...`) that the runner compiles; the request waits until it has.
    `prompt_logprobs` is the number of alternatives to report for each prompt token but the first, -1 for no report.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    choice: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int = -1
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    repetition_max_pattern: int = 0
    repetition_min_pattern: int = 1
    repetition_min_count: int = 3
    grammar: str = ""
    prompt_logprobs: int = -1


class TokenLogprobs(msgspec.Struct, tag="logprobs", array_like=True, frozen=True, gc=False):
    """Log-probabilities for one sampled token, natural log, finite (floored at -9999).

    `top_ids` (i32) and `top_logprobs` (f32) hold the asked number of alternatives, best first.
    """

    id: int
    position: int
    logprob: float
    rank: int
    top_ids: bytes = b""
    top_logprobs: bytes = b""


class PromptLogprobs(msgspec.Struct, tag="prompt_logprobs", array_like=True, frozen=True, gc=False):
    """Log-probabilities of N consecutive tokens of a prompt, each given those before it; natural log, finite as above.

    `position` is the index of the first of them in the prompt, so at least 1. Columns: `logprobs` f32 [N] and `ranks`
    i32 [N] (1: the likeliest) of the tokens themselves; `top_ids` i32 and `top_logprobs` f32 [N * k], the k likeliest
    ids at each position, best first.
    """

    id: int
    incarnation: int
    position: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes = b""
    top_logprobs: bytes = b""

    @property
    def end(self) -> int:
        """The index after the last of the tokens."""
        return self.position + len(self.logprobs) // 4

"""What schemathesis can't know: which refusals of bodies that keep their schema are right, each with its reason.

Replaces its check `positive_data_acceptance`, which would take every 400 for a fault. Loaded by `schemathesis_run.py`.
"""

from __future__ import annotations

import re
from typing import Any

import schemathesis

# What the message of a 400 may say although each field keeps its schema.
REASONS = {
    "fields that contradict each other": [
        r"an answer can have one form only",
        r"excludes",
        r"contradicts max_tokens",
        r"allowed_token_ids: not together with",
        r"best_of other than n is not supported",
        r"make \d+ choices",
        r"min_tokens: \d+ is more than the limit",
        r"repetition_detection: \d+ is outside",
        r"output tokens make \d+",
        r"'\S+' is (there twice|not among the tools)",
        r"starting_after: needs stream",
    ],
    "what only the tokenizer or the chat template knows": [
        r"the prompt has (no|\d+) tokens",
        r"prompt is too long",
        r"token id \d+ is outside",
        r"continue_final_message",
        r"chat template",
        r"template",
    ],
    "text that is no grammar, pattern or JSON schema": [
        r"(regex|grammar|ebnf|json_schema|structured_outputs|guided_\w+|response_format|text|output_\w+)\S*: ",
        r"tools\[\d+\]\S*(parameters|format)",
        r"can't be (compiled|enforced)",
    ],
    "a result without its call": [
        r"no earlier call has the id",
        r"has not been called before",
        r"tool_call_id: required",
    ],
    "a whole number written with a fraction, which is one to JSON Schema": [r"Expected `int.*got `float`"],
    "what isn't there": [
        r"there is no item",
        r"[Oo]nly a response that was created with background",
    ],
}
KNOWN = re.compile("|".join(pattern for patterns in REASONS.values() for pattern in patterns))


@schemathesis.check
def refusals_have_a_reason(ctx: Any, response: Any, case: Any) -> None:
    """A body that keeps its schema is refused only for what no schema says."""
    if response.status_code != 400 or case.meta is None or not case.meta.generation.mode.is_positive:
        return
    error = response.json()["error"]
    assert KNOWN.search(error["message"]), f"refused although it keeps its schema: {error['message']}"


@schemathesis.check
def every_answer_has_its_request_id(ctx: Any, response: Any, case: Any) -> None:
    """Errors too."""
    assert response.headers.get("x-request-id"), "no x-request-id"
    if response.status_code in (429, 503, 529):
        assert response.headers.get("retry-after"), "no retry-after"

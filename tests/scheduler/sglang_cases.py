"""Reads the decisions that were recorded of SGLang's scheduler (tests/data/golden) and turns them into our terms."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from scheduler.policies.orders import Waiting
from scheduler.policies.prefill_budget import Candidate, Grant, PrefillBudget, Runner
from tests.scheduler.prefix_tree import Key, Node, PrefixTree

Case = dict[str, Any]
SHORTEST = "shortest-prefill-first"
LEAST_URGENT = (1 << 63) - 1
"""What a request without a priority has."""
POLICY_NAMES: dict[str, str] = {SHORTEST: "shortest-prefill"}


def recorded(file: str, part: str) -> dict[str, Case]:
    """The cases of one part of a file by name; unnamed ones are numbered."""
    path = Path(__file__).parents[1] / f"data/golden/sglang_{file}.json.gz"
    cases = json.loads(gzip.decompress(path.read_bytes()))[part]
    return {case.get("name", f"{part}-{index}"): case for index, case in enumerate(cases)}


def tokens_of(runs: list[list[int]]) -> tuple[int, ...]:
    """Token ids from runs of (first, count)."""
    return tuple(first + step for first, count in runs for step in range(count))


def known_tokens(request: Case) -> tuple[int, ...]:
    """Prompt and outputs."""
    return tokens_of(request["prompt"]) + tokens_of(request.get("output", []))


def key_of(request: Case) -> Key:
    """What may be matched: all known tokens but the last, which has to be computed."""
    return Key(known_tokens(request)[:-1], request.get("extra_key"))


def urgency(request: Case, low_values_first: bool) -> int:
    """The priority in our sense, smaller is more urgent. Without one: the least urgent."""
    priority: int | None = request.get("priority", 0)
    if priority is None:
        return LEAST_URGENT
    return priority if low_values_first else -priority


def tree_of(case: Case) -> PrefixTree:
    """The cache of a case. Entries are either runs of tokens, or those with a namespace."""
    tree = PrefixTree(case["page_size"])
    for entry in case["cache"]:
        tree.insert(
            Key(tokens_of(entry["prompt"]), entry.get("extra_key")) if "prompt" in entry else Key(tokens_of(entry))
        )
    return tree


def in_pages(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size) * page_size


def held(request: Case, page_size: int) -> int:
    """KV tokens of a running request; none for one that has ended."""
    if request.get("finished"):
        return 0
    return in_pages(request["input_len"] + request["output_len"] - 1, page_size)


def runner_of(request: Case) -> Runner:
    return Runner(
        request["input_len"], request["output_len"], request["max_new_tokens"], request.get("ignore_eos", False)
    )


def candidate_of(request: Case, path: list[Node]) -> Candidate:
    """A waiting request whose cached prefix is `path`."""
    return Candidate(
        tokens=len(known_tokens(request)),
        matched=sum(len(node.tokens) for node in path),
        max_new=request.get("max_new_tokens", 128),
        output_len=len(tokens_of(request.get("output", []))),
        ignore_eos=request.get("ignore_eos", False),
        pinned=PrefixTree.unlocked(path),
    )


def waiting_of(request: Case, path: list[Node], deferred: bool, low_values_first: bool) -> Waiting:
    return Waiting(
        id=request["id"],
        prompt_len=len(tokens_of(request["prompt"])),
        output_len=len(tokens_of(request.get("output", []))),
        matched=sum(len(node.tokens) for node in path),
        max_new=request.get("max_new_tokens", 128),
        priority=urgency(request, low_values_first),
        entry=request.get("entry_time", 0.0),
        routing_key=request.get("routing_key"),
        seen_processed=request.get("arrival_processed_tokens", 0),
        deferred=deferred,
        path=tuple(path),
    )


def budget_of(case: Case, tree: PrefixTree) -> PrefillBudget:
    return PrefillBudget(
        available=case["available"] + tree.evictable(),
        page_size=case["page_size"],
        ratio=case["new_token_ratio"],
        max_prefill_tokens=case["max_prefill_tokens"],
        running=[runner_of(request) for request in case["running"]],
        chunk_size=case["chunked_prefill_size"],
        mixed_decode_tokens=case.get("mixed_decode_tokens", 0),
        max_requests=case.get("prefill_max_requests"),
        truncation_align=case.get("truncation_align_size"),
        one_chunk=case.get("schedule_policy") == SHORTEST,
        simulate_completions=case.get("tree_disabled", False),
    )


def left(budget: PrefillBudget) -> Case:
    """What the budgets have left, in the recording's terms."""
    return {
        "rem_total": pytest.approx(budget.rem_total, abs=1e-9),
        "cur_rem": pytest.approx(budget.cur_rem, abs=1e-9),
        "rem_input": budget.rem_input,
        "rem_chunk": budget.rem_chunk,
    }


def offered(budget: PrefillBudget, tree: PrefixTree, request: Case, tree_disabled: bool) -> tuple[Grant, int]:
    """Offer one waiting request; what it matched stays locked if it was admitted. Returns the matched tokens, too."""
    path = [] if tree_disabled else tree.path(key_of(request))
    candidate = candidate_of(request, path)
    grant = budget.offer(candidate)
    if grant.extend:
        tree.lock(path)
    return grant, candidate.matched

"""The `vllm` preset decides what vLLM's scheduler was recorded to decide, step by step, on every script."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from protocol.columns import i32, u64
from tests.scheduler.isolated import Isolated, limits

SCRIPTS: dict[str, Any] = json.loads(
    gzip.decompress((Path(__file__).parents[1] / "data/golden/vllm_scheduler.json.gz").read_bytes())
)


def token(request_id: int, position: int) -> int:
    return 1000 + (request_id * 7919 + position * 104729) % 40000


def prompt_of(request: dict[str, Any]) -> list[int]:
    shared, group = request.get("shared_prefix", 0), request.get("prefix_group", 0)
    own = request["prompt_len"] - shared
    return [100 + (group * 31 + j * 17) % 40000 for j in range(shared)] + [token(request["id"], j) for j in range(own)]


def isolated_for(script: dict[str, Any]) -> Isolated:
    config = script["config"]
    lengths = {request["id"]: request["prompt_len"] for request in script["requests"]}
    return Isolated(
        0,
        limit=limits(config["usable_blocks"], config["block_size"], max_model_len=config["max_model_len"]),
        sample=lambda request_id, position: token(request_id, 100_000 + position - lengths[request_id]),
        preset="vllm",
        queue_policy=config["policy"],
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        enable_prefix_caching=config["prefix_caching"],
        watermark=config.get("watermark", 0.0),
        long_prefill_token_threshold=config.get("long_prefill_token_threshold", 0),
    )


def decide(isolated: Isolated) -> dict[str, Any]:
    """One pass and its update, described in the recording's terms."""
    core = isolated.core
    preemptions = {request_id: request.num_preemptions for request_id, request in core.requests.items()}
    ended = set(isolated.finished)
    step = core.schedule()
    seen: dict[str, Any] = {"scheduled": {}, "new": [], "resumed": [], "cached_tokens": {}}
    if step is not None:
        seen["scheduled"] = dict(zip(map(str, u64(step.ids).tolist()), i32(step.num_tokens).tolist(), strict=True))
        for new in step.new:
            seen["resumed" if preemptions[new.id] else "new"].append(str(new.id))
            if new.num_computed:
                seen["cached_tokens"][str(new.id)] = new.num_computed
    seen["preempted"] = [str(i) for i in preemptions if core.requests[i].num_preemptions > preemptions[i]]
    seen["free_blocks"] = core.pool.num_free
    seen["running"] = [str(request.id) for request in core.table.requests()]
    if step is not None:
        core.update(isolated.runner.execute(step))
        isolated.collect()
    seen["finished"] = [str(request_id) for request_id in isolated.finished if request_id not in ended]
    return seen


def normalised(step: dict[str, Any]) -> dict[str, Any]:
    """Order only where the recording has it: in `running`."""
    result = {key: sorted(step[key]) for key in ("new", "resumed", "preempted", "finished")}
    result |= {key: step[key] for key in ("scheduled", "free_blocks", "running")}
    return result | {"cached_tokens": {key: value for key, value in step["cached_tokens"].items() if value}}


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_vllm_preset_decides_as_recorded(name: str) -> None:
    script = SCRIPTS[name]
    isolated = isolated_for(script)
    for recorded in script["steps"]:
        for abort in script["aborts"]:
            if abort["step"] == recorded["step"]:
                isolated.abort(int(abort["id"]))
        for request in script["requests"]:
            if request["step"] == recorded["step"]:
                isolated.add(
                    request["id"], prompt_of(request), request["max_tokens"], priority=request.get("priority", 0)
                )
        assert normalised(decide(isolated)) == normalised(recorded), f"step {recorded['step']}"
    isolated.drain()

"""Runs inside an interpreter that has vLLM, as its `--distributed-executor-backend words_executor.WordsExecutor`.

No model: every request that has been prefilled gets the next of the given tokens in each step. What vLLM's API server
costs can then be measured with its own engine and scheduler beside it. It imports nothing of this project.

WORDS_FILE names a file with the token ids as JSON, WORDS_STEP_MS the least time of a step.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from typing import Any

KV_BYTES = 2**30
BLOCK_SIZE = 16
Executor: Any = import_module("vllm.v1.executor.abstract").Executor


class WordsExecutor(Executor):  # type: ignore[misc]
    """What vLLM asks of an executor, answered without a worker."""

    def _init_executor(self) -> None:
        self._words: list[int] = json.loads(Path(os.environ["WORDS_FILE"]).read_text())
        self._step_s = float(os.environ["WORDS_STEP_MS"]) / 1000
        self._next_step = 0.0
        self._known: dict[str, int] = {}  # tokens of each request, prompt and outputs
        self._computed: dict[str, int] = {}
        self._output = import_module("vllm.v1.outputs").ModelRunnerOutput
        platform = import_module("vllm.platforms").current_platform
        platform.update_block_size_for_backend(self.vllm_config)

    def collective_rpc(self, method: Any, *_: Any, non_block: bool = False, **__: Any) -> Any:
        """One answer, as from one worker."""
        answer: list[Any] = [self._answer(str(method))]
        if not non_block:
            return answer
        future: Future[Any] = Future()
        future.set_result(answer)
        return future

    def _answer(self, method: str) -> Any:
        if method == "get_kv_cache_spec":
            torch, interface = import_module("torch"), import_module("vllm.v1.kv_cache_interface")
            size = self.vllm_config.cache_config.block_size or BLOCK_SIZE
            return {
                "layer": interface.FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.bfloat16)
            }
        if method == "get_supported_tasks":
            return ("generate",)
        if method == "determine_available_memory":
            return KV_BYTES
        if method == "get_supported_kv_cache_layouts":
            enum = import_module("vllm.v1.kv_cache_interface").KVCacheLayout
            return [one.name for one in enum]
        return None

    def compile_or_warm_up_model(self) -> None:
        """There is nothing to compile."""

    def execute_model(self, scheduled: Any, non_block: bool = False) -> Any:
        """A word for each request whose tokens are all computed by now."""
        for new in scheduled.scheduled_new_reqs:
            self._known[new.req_id] = len(new.prompt_token_ids)
            self._computed[new.req_id] = new.num_computed_tokens
        for gone in scheduled.finished_req_ids:
            self._known.pop(gone, None)
            self._computed.pop(gone, None)
        ids = list(scheduled.num_scheduled_tokens)
        tokens: list[list[int]] = []
        for request_id, count in scheduled.num_scheduled_tokens.items():
            self._computed[request_id] += count
            if self._computed[request_id] < self._known[request_id]:
                tokens.append([])
                continue
            tokens.append([self._words[self._known[request_id] % len(self._words)]])
            self._known[request_id] += 1
        result = self._output(
            req_ids=ids,
            req_id_to_index={request_id: row for row, request_id in enumerate(ids)},
            sampled_token_ids=tokens,
        )
        time.sleep(max(0.0, self._next_step - time.monotonic()))
        self._next_step = time.monotonic() + self._step_s
        if not non_block:
            return result
        future: Future[Any] = Future()
        future.set_result(result)
        return future

    def check_health(self) -> None:
        """It can't be ill."""

    def shutdown(self) -> None:
        """It holds nothing."""

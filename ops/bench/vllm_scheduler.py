"""Runs inside an interpreter that has vLLM and times vLLM's own scheduler on request; imports nothing of this project.

    python vllm_scheduler.py MODEL_DIRECTORY

Reads JSON lines from stdin and answers each on stdout: {"load": N, "prompt_len": P, "max_steps": S} builds a scheduler
whose N requests all decode; {"steps": K} runs K steps and answers [[schedule_ns, update_ns, rows], ...].
Of the model directory only the configuration is read. vLLM is imported by name: this project doesn't depend on it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from typing import Any

BLOCK_SIZE = 16
STEP_TOKENS = 8192
MAX_MODEL_LEN = 8192
FIRST_TOKEN, NUM_TOKENS = 1000, 40_000


class VllmSubject:
    """vLLM's scheduler with `running` requests and results made by hand, outside the timed calls."""

    def __init__(self, model: str, running: int, prompt_len: int, max_steps: int) -> None:
        torch, config, kv_cache_utils = map(import_module, ("torch", "vllm.config", "vllm.v1.core.kv_cache_utils"))
        kv_cache = import_module("vllm.v1.kv_cache_interface")
        sha256 = import_module("vllm.utils.hashing").sha256
        request_class = import_module("vllm.v1.request").Request
        structured_output = import_module("vllm.v1.structured_output")

        self._output = import_module("vllm.v1.outputs").ModelRunnerOutput
        prefill_steps = 2 + -(-running * (prompt_len + BLOCK_SIZE) // max(1, STEP_TOKENS - running))
        max_tokens = max_steps + prefill_steps
        num_blocks = 2 * running * (-(-(prompt_len + BLOCK_SIZE + max_tokens) // BLOCK_SIZE) + 1)
        cache = config.CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
        cache.num_gpu_blocks = num_blocks
        whole = config.VllmConfig(
            model_config=config.ModelConfig(model=model, dtype="bfloat16", max_model_len=MAX_MODEL_LEN),
            cache_config=cache,
            scheduler_config=config.SchedulerConfig(
                max_num_seqs=running,
                max_num_batched_tokens=STEP_TOKENS,
                max_model_len=MAX_MODEL_LEN,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
            device_config=config.DeviceConfig("cpu"),
        )
        layer = kv_cache.FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self._scheduler = import_module("vllm.v1.core.sched.scheduler").Scheduler(
            vllm_config=whole,
            kv_cache_config=kv_cache.KVCacheConfig(
                num_blocks=num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[kv_cache.KVCacheGroupSpec(["layer"], layer)],
            ),
            structured_output_manager=structured_output.StructuredOutputManager(whole),
            block_size=BLOCK_SIZE,
            log_stats=True,
        )
        kv_cache_utils.init_none_hash(sha256)
        hasher = kv_cache_utils.get_request_block_hasher(BLOCK_SIZE, sha256)
        sampling = import_module("vllm.sampling_params").SamplingParams(
            ignore_eos=True, temperature=0.0, max_tokens=max_tokens
        )
        sampling.update_from_generation_config({}, 0)
        for index in range(running):
            length = prompt_len + index % BLOCK_SIZE  # so that in every step one row in 16 needs a block
            self._scheduler.add_request(
                request_class(
                    request_id=f"request-{index}",
                    prompt_token_ids=[(j * 31 + index * 7919) % NUM_TOKENS + FIRST_TOKEN for j in range(length)],
                    sampling_params=sampling,
                    pooling_params=None,
                    block_hasher=hasher,
                )
            )
        while self.step()[3] < running:
            pass

    def step(self) -> tuple[int, int, int, int]:
        """(schedule ns, update ns, rows, rows that sampled) of one step."""
        start = time.perf_counter_ns()
        scheduled = self._scheduler.schedule()
        schedule_ns = time.perf_counter_ns() - start
        ids = list(scheduled.num_scheduled_tokens)
        tokens = [[self._token(request_id)] if self._samples(request_id) else [] for request_id in ids]
        result = self._output(
            req_ids=ids,
            req_id_to_index={request_id: row for row, request_id in enumerate(ids)},
            sampled_token_ids=tokens,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        start = time.perf_counter_ns()
        self._scheduler.update_from_output(scheduled, result)
        return schedule_ns, time.perf_counter_ns() - start, len(ids), sum(map(len, tokens))

    def _samples(self, request_id: str) -> bool:
        request = self._scheduler.requests[request_id]
        return bool(request.num_computed_tokens >= request.num_tokens)

    def _token(self, request_id: str) -> int:
        return FIRST_TOKEN + int(self._scheduler.requests[request_id].num_tokens) % NUM_TOKENS


def main(model: str) -> None:
    """Answers commands until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints is not an answer
    subject: VllmSubject | None = None
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        if "load" in command:
            subject = VllmSubject(model, command["load"], command["prompt_len"], command["max_steps"])
            answer: Any = {"version": import_module("vllm").__version__}
        else:
            assert subject is not None, "steps before load"
            answer = [subject.step()[:3] for _ in range(command["steps"])]
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

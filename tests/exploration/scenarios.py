"""What is explored: small loads on a small pool, with what each client has to get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from protocol.columns import i32, pack_i32, pack_u64
from protocol.messages import NewRequest, SamplingParams, Step
from runner.config import RunnerConfig
from runner.sim import SimulatedExecutor


@dataclass(frozen=True)
class Ask:
    """One request. `stop_after` outputs its client has all the text that it wants (0: it wants all)."""

    name: str
    prompt: tuple[int, ...]
    outputs: int
    seed: int = 0
    stop_after: int = 0


@dataclass(frozen=True)
class Scenario:
    """A load and the sizes it meets."""

    name: str
    asks: tuple[Ask, ...]
    depth: int = 2
    blocks: int = 3
    block_size: int = 4
    step_tokens: int = 8
    scheduler: tuple[tuple[str, Any], ...] = ()


def expected(ask: Ask) -> list[int]:
    """The tokens of a request that is alone in the world, computed step by step."""
    alone = SimulatedExecutor(RunnerConfig(backend="sim", sim_vocab_size=1000, sim_step_ms=0, sim_num_blocks=9))
    prompt, params = pack_i32(list(ask.prompt)), SamplingParams(ask.outputs, seed=ask.seed, ignore_eos=True)
    new = [NewRequest(1, 1, prompt, len(ask.prompt), 0, pack_i32([1]), params)]
    count, tokens = len(ask.prompt), list[int]()
    for number in range(ask.outputs):
        result = alone.execute(Step(1, number, pack_u64([1]), pack_i32([count]), new), 0)
        assert result.failure is None
        tokens += i32(result.tokens).tolist()
        new, count = [], 1
    return tokens


def _two(prompts: tuple[int, int], outputs: tuple[int, int], **stop: int) -> tuple[Ask, Ask]:
    """Two requests with prompts of these lengths; the longer one begins like the shorter one."""
    first, second = (tuple(range(10, 10 + length)) for length in prompts)
    return Ask("first", first, outputs[0], 1), Ask("second", second, outputs[1], 2, **stop)


VLLM = (("preset", "vllm"), ("watermark", 0.0))
SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("together", _two((2, 3), (2, 2)), scheduler=VLLM),
        Scenario("one step in flight", _two((2, 3), (2, 2)), depth=1, scheduler=VLLM),
        Scenario("preemption", _two((3, 4), (3, 3)), scheduler=VLLM),
        Scenario("chunks", _two((6, 5), (2, 1)), step_tokens=4, scheduler=VLLM),
        Scenario("a shared prefix", _two((5, 6), (1, 2)), scheduler=VLLM),
        Scenario("a stopped text", _two((3, 2), (2, 3), stop_after=1), scheduler=VLLM),
        Scenario("our preset", _two((3, 4), (3, 3))),
        Scenario("full reservation", _two((3, 4), (3, 3)), scheduler=(("preset", "credit"),)),
    )
}

"""What the runner's loop needs of whoever computes: limits, an inventory, and one method that runs a step."""

from __future__ import annotations

from typing import Protocol

from protocol.messages import FetchKv, KvStatus, Limits, Step, StepResult
from runner.errands import Answer, Errand
from runner.inventory import Inventory
from runner.steps import StepSize


class Executor(Protocol):
    """Runs steps strictly in the order of the calls. Implementations: `ModelExecutor`, `SimulatedExecutor`."""

    limits: Limits
    inventory: Inventory
    weight_bytes: int

    @property
    def num_residents(self) -> int:
        """Requests in the persistent batch."""
        ...

    @property
    def step_size(self) -> StepSize:
        """How much the step that ran last computed."""
        ...

    def execute(self, step: Step, received_ns: int) -> StepResult:
        """Run one step (received at `received_ns`, monotonic). Never raises: faults are in the result's `failure`."""
        ...

    def answer(self, errand: Errand) -> Answer | None:
        """What will be answered and when; None: never. Called on the link's thread, while steps run."""
        ...

    def transfer(self, order: FetchKv, status: KvStatus | None) -> None:
        """A KV transfer has begun or, with `status`, ended. Called in order with the steps."""
        ...

    def clear(self) -> None:
        """A new scheduler took over: forget all residents, keep the pages and the inventory."""
        ...

"""What the runner's loop needs of whoever computes: limits, an inventory, and one method that runs a step."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from protocol.messages import FetchKv, KvStatus, Limits, Step, StepResult
from runner.errands import Answer, Errand, Promise
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

    def answer(self, errand: Errand) -> Answer | Promise | None:
        """What will be answered and when; None: never. Called on the link's thread, which it must not hold up."""
        ...

    def transfer(self, order: FetchKv, status: KvStatus | None) -> None:
        """A KV transfer has begun or, with `status`, ended. Called in order with the steps."""
        ...

    def clear(self) -> None:
        """A new scheduler took over: forget all residents, keep the pages and the inventory."""
        ...


class Launched(Protocol):
    """A step under way."""

    @property
    def ready(self) -> bool:
        """Whether it has ended: to collect it takes no waiting."""
        ...


@runtime_checkable
class PipelinedExecutor(Executor, Protocol):
    """An executor whose device computes while the host goes on: `launch` and `collect` in place of `execute`."""

    depth: int
    """Steps that may be under way at a time."""
    lost: bool
    """Whether the device has failed for good: only a new process can compute again."""

    def launch(self, step: Step, received_ns: int) -> Any:
        """Issue a step (received at `received_ns`, monotonic) after those before it; a `Launched`. Never raises."""
        ...

    def collect(self, launched: Any) -> StepResult:
        """The result of a step that was launched here, waiting for its end. In the order of the launches."""
        ...


@runtime_checkable
class Closing(Protocol):
    """An executor that holds other processes."""

    def close(self) -> None:
        """Nothing more will be run: end them."""
        ...

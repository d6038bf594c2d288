"""How much of the running requests' allowed output to expect: one number that decays while all goes well.

SGLang's rule. It is an estimate for admission, never a limit on what a request may generate.
"""

from __future__ import annotations

#: Output tokens credited to each survivor of a retraction on top of what it has: the pool shouldn't be full at once.
STEPS_AFTER_RETRACTION = 20


def share_decoded(decoded: int, allowed: int, count: int) -> float:
    """The share of their allowed output that `count` requests will soon have, 0 to 1; 0 for no requests.

    They have generated `decoded` tokens of `allowed`: (decoded + 20·count) / (allowed + 1).
    """
    return min(1.0, (decoded + STEPS_AFTER_RETRACTION * count) / (allowed + 1))


class RatioController:
    """The current ratio, between `floor` and 1."""

    def __init__(
        self,
        conservativeness: float = 1.0,
        *,
        initial: float = 0.7,
        floor_factor: float = 0.14,
        decay_steps: int = 600,
    ) -> None:
        """Starts at `initial * conservativeness` (at most 1) and reaches `floor_factor` of that in `decay_steps` steps.

        Raises ValueError for values that give no ratio above 0, or one that would grow.
        """
        if conservativeness <= 0 or initial <= 0 or decay_steps < 1 or not 0 <= floor_factor <= 1:
            raise ValueError(
                f"no ratio from conservativeness {conservativeness}, initial {initial}, floor factor {floor_factor} "
                f"and {decay_steps} steps"
            )
        self.initial = min(initial * conservativeness, 1.0)
        self.floor = self.initial * floor_factor
        self.step = (self.initial - self.floor) / decay_steps
        self.value = self.initial

    def decay(self) -> None:
        """A decode step went by without a retraction."""
        self.value = max(self.value - self.step, self.floor)

    def retract(self, decoded: int, allowed: int, count: int) -> None:
        """The pool was full: expect what the `count` survivors show, see `share_decoded`. Never below the floor."""
        self.value = max(share_decoded(decoded, allowed, count), self.floor)

    def reset(self) -> None:
        """Nothing is live any more: start again."""
        self.value = self.initial

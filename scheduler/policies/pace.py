"""How long a step will take, learned from those that came back: what a step is sized by when a token has a due time.

A step's time is taken to be linear in its size, differently for steps of decodes alone, which wait for memory, and for
steps with prefill, which wait for arithmetic:

    decodes:  t = a + c·C + d·R          prefill:  t = a' + b'·T + c'·C

T tokens, C tokens attended, R rows; no coefficient is negative.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FORGETTING = 0.998
SOLVE_EVERY = 8
PULL = 1e-3
PREFILL_TOKENS = 128
BEYOND_MEMORY, BELOW_ARITHMETIC = 1.5, 0.7
"""A smaller prefill says something about arithmetic only if its step takes that much longer than memory alone would, or
so much less than arithmetic was thought to take."""
_TOKENS, _CONTEXT, _ROWS = 1e-3, 1e-5, 1e-2
"""Scales that bring T, C and R near 1."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """T, C and R of a step."""

    tokens: int
    context: int
    rows: int


Triple = tuple[float, float, float]


class _LeastSquares:
    """Non-negative least squares over three features, older observations fading, pulled slightly towards a prior.

    The pull decides where the observations don't: steps of one size say nothing about what a larger one costs more.
    Only the prior's shape counts; how large it is, the observations say: a device may be a hundred times slower. The
    sums are plain numbers: for three features that is cheaper than arrays. They are only solved when somebody asks.
    """

    def __init__(self, prior: Triple) -> None:
        self._prior: npt.NDArray[np.float64] = np.array(prior)
        self._products = (0.0,) * 6
        """Of the features with each other: the upper triangle."""
        self._targets: Triple = (0.0, 0.0, 0.0)
        self._weights: Triple = prior
        self._due: tuple[tuple[float, ...], Triple] | None = None
        """The sums by which the next weights go, where they aren't solved yet."""
        self._unsolved = 0
        self.seen = 0

    def learn(self, features: Triple, value: float) -> None:
        a, b, c = features
        aa, ab, ac, bb, bc, cc = self._products
        x, y, z = self._targets
        keep = min(FORGETTING, 1.0 - 2.0 / (self.seen + 4.0))  # the first steps aren't typical: compiling, cold memory
        self._products = (
            keep * aa + a * a,
            keep * ab + a * b,
            keep * ac + a * c,
            keep * bb + b * b,
            keep * bc + b * c,
            keep * cc + c * c,
        )
        self._targets = (keep * x + a * value, keep * y + b * value, keep * z + c * value)
        self.seen += 1
        self._unsolved += 1

    def settle(self) -> None:
        """What a request for the weights settles even if nobody looks at them: by which observations they go."""
        if self._unsolved >= min(SOLVE_EVERY, self.seen):
            self._unsolved = 0
            self._due = self._products, self._targets

    def weights(self) -> Triple:
        """The three coefficients, none of them negative."""
        self.settle()
        if self._due is not None:
            self._solve(*self._due)
            self._due = None
        return self._weights

    def _solve(self, sums: tuple[float, ...], values: Triple) -> None:
        aa, ab, ac, bb, bc, cc = sums
        foreseen = float(self._prior @ (aa, ab, ac))  # the first feature is 1
        scale = values[0] / foreseen if foreseen > 0 else 1.0
        products = np.array(((aa, ab, ac), (ab, bb, bc), (ac, bc, cc))) + PULL * np.eye(3)
        targets = np.array(values) + PULL * scale * self._prior
        used = [0, 1, 2]
        while used:
            solved = np.linalg.solve(products[np.ix_(used, used)], targets[used])
            if (solved >= 0).all():
                break
            used = [feature for feature, weight in zip(used, solved.tolist(), strict=True) if weight > 0]
        found = dict(zip(used, solved.tolist() if used else [], strict=True))
        self._weights = (found.get(0, 0.0), found.get(1, 0.0), found.get(2, 0.0))


class StepPace:
    """Predicts step times in ns, and how much prefill fits into one. Starts from an 8B model on one large GPU."""

    def __init__(self) -> None:
        self._decodes = _LeastSquares((5.5e6, 4.4e6, 0.2e6))
        self._prefill = _LeastSquares((0.0, 40e6, 4.4e6))

    @property
    def ready(self) -> bool:
        """Whether both kinds of step have been seen."""
        return min(self._decodes.seen, self._prefill.seen) > 0

    def learn(self, size: StepSize, took_ns: int) -> None:
        """A step of this size took so long on the device."""
        if size.tokens > size.rows and self._tells_of_arithmetic(size, took_ns):
            self._prefill.learn((1.0, size.tokens * _TOKENS, size.context * _CONTEXT), float(took_ns))
        elif size.tokens == size.rows:
            self._decodes.learn((1.0, size.context * _CONTEXT, size.rows * _ROWS), float(took_ns))

    def _tells_of_arithmetic(self, size: StepSize, took_ns: int) -> bool:
        return (
            size.tokens - size.rows >= PREFILL_TOKENS
            or took_ns > BEYOND_MEMORY * self._memory(size)
            or took_ns < BELOW_ARITHMETIC * self._arithmetic(size.tokens, size.context)
        )

    def learn_decodes(self, first: StepSize, times_ns: Iterable[int]) -> None:
        """Steps of decodes alone went by, `first` the size of the first: the same rows throughout, each with one token
        more in every step. As if each had been predicted, and learned from before the next."""
        rows, context = first.rows * _ROWS, first.context
        for took_ns in times_ns:
            self._decodes.settle()
            self._decodes.learn((1.0, context * _CONTEXT, rows), float(took_ns))
            context += first.rows

    def predict(self, size: StepSize) -> int:
        """Nanoseconds of a step of this size: the slower of what memory and arithmetic take."""
        arithmetic = self._arithmetic(size.tokens, size.context) if size.tokens > size.rows else 0.0
        return int(max(self._memory(size), arithmetic, 1.0))

    @property
    def work_ns(self) -> tuple[float, float]:
        """What a token adds to a step that waits for arithmetic, and what a token that it attends adds."""
        _, tokens, attended = self._prefill.weights()
        return max(tokens, 1.0) * _TOKENS, attended * _CONTEXT

    def _memory(self, size: StepSize) -> float:
        fixed, context, rows = self._decodes.weights()
        return float(fixed + context * size.context * _CONTEXT + rows * size.rows * _ROWS)

    def _arithmetic(self, tokens: int, context: int) -> float:
        fixed, each, attended = self._prefill.weights()
        return float(fixed + each * tokens * _TOKENS + attended * context * _CONTEXT)

    def tokens_within(self, limit_ns: float, context: int) -> int:
        """Tokens of a step with prefill that takes `limit_ns`, if its rows attend `context` tokens besides."""
        fixed, tokens, attended = self._prefill.weights()
        left = limit_ns - fixed - max(attended, 0.0) * context * _CONTEXT
        return max(0, int(left / (max(tokens, 1.0) * _TOKENS)))

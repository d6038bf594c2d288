"""How a victim returns: what is kept of a preempted request's KV, and what bringing it back will cost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass


class HostPool:
    """Host blocks that swapped-out KV lies in. Ids from 0; order of reuse is last freed first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks without a holder."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` blocks. Raises ValueError if there are not that many."""
        if count > len(self._free):
            raise ValueError(f"{count} host blocks wanted, {len(self._free)} free")
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken[::-1]

    def release(self, blocks: list[int]) -> None:
        """Give blocks back."""
        self._free += blocks


class MeasuredRates:
    """What this runner has shown: prefill and copy rates, from step timings. Nothing is assumed before it is seen."""

    SMOOTHING = 0.2

    def __init__(self) -> None:
        self.prefill_tokens_per_s = 0.0
        self.copy_bytes_per_s = 0.0

    def saw_step(self, tokens: int, rows: int, compute_s: float) -> None:
        """A step computed `tokens` for `rows` rows. Only steps that are mostly prefill say anything about prefill."""
        if tokens >= 4 * rows and tokens >= 64 and compute_s > 0:
            self.prefill_tokens_per_s = self._smooth(self.prefill_tokens_per_s, tokens / compute_s)

    def saw_copy(self, num_bytes: int, seconds: float) -> None:
        """A step copied `num_bytes` between device and host."""
        if num_bytes and seconds > 0:
            self.copy_bytes_per_s = self._smooth(self.copy_bytes_per_s, num_bytes / seconds)

    def _smooth(self, old: float, new: float) -> float:
        return new if old == 0 else old + self.SMOOTHING * (new - old)


@dataclass(frozen=True, slots=True)
class Loss:
    """What a victim has: `computed` tokens in `num_blocks` blocks, of which `cached_tokens` would survive as cache."""

    computed: int
    num_blocks: int
    cached_tokens: int
    bytes_per_block: int


class RecoveryPolicy(ABC):
    """Decides whether a victim's KV is copied to the host or dropped."""

    name: str
    last = ""
    """The newest choice in words, with its numbers, where there was one to make."""

    @abstractmethod
    def swaps(self, loss: Loss, host: HostPool, rates: MeasuredRates) -> bool:
        """Whether to swap; False drops the KV. Never True if the host has no room."""


class Recompute(RecoveryPolicy):
    """Drop the KV. The blocks keep their hashes, so what nobody overwrites in the meantime is hit on return."""

    name = "recompute"

    def swaps(self, loss: Loss, host: HostPool, rates: MeasuredRates) -> bool:
        return False


class Swap(RecoveryPolicy):
    """Copy to the host whenever it has room; else recompute."""

    name = "swap"

    def swaps(self, loss: Loss, host: HostPool, rates: MeasuredRates) -> bool:
        return 0 < loss.num_blocks <= host.num_free


class Auto(RecoveryPolicy):
    """Whichever is expected to take less time: copying both ways, or prefilling what the cache will no longer hold.

    Rates are measured on this runner. Until a copy has been seen there is nothing to compare: the first victim that
    has computed at least `probe_tokens` tokens is swapped, to learn.
    """

    name = "auto"
    probe_tokens = 256

    def swaps(self, loss: Loss, host: HostPool, rates: MeasuredRates) -> bool:
        if not 0 < loss.num_blocks <= host.num_free:
            self.last = f"recompute: {loss.num_blocks} blocks wanted on the host, {host.num_free} free"
            return False
        if not rates.copy_bytes_per_s or not rates.prefill_tokens_per_s:
            probe = loss.computed >= self.probe_tokens and rates.prefill_tokens_per_s > 0
            self.last = f"{'swap' if probe else 'recompute'}: no copy has been measured yet"
            return probe
        copy_s = 2 * loss.num_blocks * loss.bytes_per_block / rates.copy_bytes_per_s
        prefill_s = (loss.computed - loss.cached_tokens) / rates.prefill_tokens_per_s
        chosen = "swap" if copy_s < prefill_s else "recompute"
        self.last = (
            f"{chosen}: copying {loss.num_blocks} blocks both ways {copy_s * 1e3:.2f} ms "
            f"({rates.copy_bytes_per_s / 1e9:.2f} GB/s), prefilling {loss.computed - loss.cached_tokens} of "
            f"{loss.computed} tokens {prefill_s * 1e3:.2f} ms ({rates.prefill_tokens_per_s:.0f} tokens/s)"
        )
        return copy_s < prefill_s


RECOVERY_POLICIES: dict[str, Callable[[], RecoveryPolicy]] = {policy.name: policy for policy in (Recompute, Swap, Auto)}

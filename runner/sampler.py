"""From logits to tokens, in one order of operations on every device. Keeps no state between steps.

For each row, in float32:
 1. ids ≥ vocab_size (rows that only pad the head) are masked; rows with NaN or infinity fail alone
 2. log-probabilities to report are taken here: they describe the model, not the request's settings
 3. allow list, 4. end ids masked while fewer than min_tokens outputs exist, 5. logit bias
 6. penalties: repetition over prompt and output, presence and frequency over the output
 7. what a row's grammar doesn't allow next is masked, and nothing after this lifts an id
 8. temperature < 1e-5: argmax, done; else divide by temperature
 9. top-k, 10. top-p, 11. min-p: each keeps ids at or above a threshold (ties stay, so no sort order matters)
12. the first id, in id order, whose cumulated probability exceeds u, with u a function of (seed, choice, position)

Penalties and grammars go by the request's tokens alone, so a resumed request needs nothing restored, and a row's
token depends on its own tokens and parameters only: never on its slot, its neighbours, chunks or preemption.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protocol.messages import TokenLogprobs
from runner.batch import Batch, Int32s, Int64s, spread
from runner.grammar.masks import GRAMMAR_ERROR, Masks, Uint32s, bounds
from runner.params import GREEDY_BELOW, NO_ALLOWED
from runner.steps import Sampled
from runner.uniform import uniforms

LOGPROB_FLOOR = -9999.0
NON_FINITE = "non_finite_logits"
NOT_FINITE = (NON_FINITE, "the model's logits are not finite numbers")
_RUN = 256  # ids that are summed together first
_NEVER = float("-inf")

Bad = dict[int, tuple[str, str]]


class Sampler:
    """Samples for rows of a batch. `vocab_size` counts the ids that may be sampled; logits may be wider.

    Without `masks`, rows with a grammar fail alone.
    """

    def __init__(self, vocab_size: int, masks: Masks | None = None) -> None:
        self._vocab_size = vocab_size
        self._masks = masks

    def sample(self, logits: Tensor, batch: Batch, slots: Int64s) -> Sampled:
        """logits float32 [S, ≥ vocab_size] (clobbered) for the requests in `slots` [S] -> one token each."""
        if len(slots) == 0:
            return Sampled(np.zeros(0, np.int32))
        logits = logits[:, : self._vocab_size]
        allowed = self._allowed(batch, slots)  # first: a device may still be computing the logits
        bad = self._non_finite(logits)
        params = batch.params
        if params.plain[slots].all():
            return Sampled(logits.argmax(1).to(torch.int32).cpu().numpy(), bad=bad)
        reporting = np.flatnonzero(params.logprobs[slots] >= 0)
        raw = torch.log_softmax(logits[_on(reporting, logits)], 1) if len(reporting) else None
        self._edit(logits, batch, slots, bad)
        if allowed is not None:
            self._constrain(logits, batch, slots, allowed, bad)
        tokens = self._choose(logits, batch, slots)
        logprobs = [] if raw is None else self._report(raw, reporting, tokens, batch, slots, bad)
        return Sampled(tokens, logprobs, bad)

    @staticmethod
    def _non_finite(logits: Tensor) -> Bad:
        # One pass: a sum is finite unless a term isn't (finite float32 logits of a model don't overflow it).
        sums = logits.sum(1)
        if bool(torch.isfinite(sums).all()):
            return {}
        broken = (~torch.isfinite(logits)).any(1).nonzero().flatten().tolist()
        logits[broken] = 0.0  # keep what follows free of NaN; the row's token is not used
        return dict.fromkeys(broken, NOT_FINITE)

    def _edit(self, logits: Tensor, batch: Batch, slots: Int64s, bad: Bad) -> None:
        """Steps 3 to 6, in place."""
        params = batch.params
        for row in np.flatnonzero(params.edited[slots]).tolist():
            slot = int(slots[row])
            allowed = params.allowed.get(slot)
            if allowed is not None:
                kept = logits[row, _on(allowed, logits)].clone()
                logits[row] = _NEVER
                logits[row, _on(allowed, logits)] = kept
            ends = params.end_ids.get(slot) if slot not in params.constraints else None  # the mask sees to those
            if ends is not None and batch.num_tokens[slot] - batch.num_prompt[slot] < params.min_tokens[slot]:
                logits[row, _on(ends, logits)] = _NEVER
            bias = params.bias.get(slot)
            if bias is not None:
                ids, values = bias
                # index_add_ rather than +=: an id that is named twice counts twice
                logits[row].index_add_(0, _on(ids, logits), torch.from_numpy(values).to(logits.device))
            if bool(logits[row].amax() == _NEVER) and row not in bad:
                bad[row] = (NO_ALLOWED, "no token is left: the allow list holds only end ids that min_tokens forbids")
                logits[row] = 0.0
        penalised = np.flatnonzero(params.penalised[slots])
        if len(penalised):
            self._penalise(logits, batch, slots, penalised)

    def _allowed(self, batch: Batch, slots: Int64s) -> _Allowed | None:
        """What grammars allow next; None where no row has one."""
        rows = np.flatnonzero(batch.params.constrained[slots])
        if len(rows) == 0:
            return None
        if self._masks is None:
            return _Allowed(rows, None, dict.fromkeys(range(len(rows)), "this runner compiles no grammars"))
        return _Allowed(rows, *self._masks.of(batch, slots[rows]))

    def _constrain(self, logits: Tensor, batch: Batch, slots: Int64s, allowed: _Allowed, bad: Bad) -> None:
        """Step 7, in place."""
        rows, masks, failed = allowed
        if masks is not None:
            # Row by row and in place: to gather the rows and put them back costs several times as much as this.
            for index, (row, bound) in enumerate(zip(rows.tolist(), bounds(masks, logits), strict=True)):
                torch.minimum(logits[row], bound[: logits.shape[1]], out=logits[row])
                if int(slots[row]) in batch.params.allowed and bool(logits[row].amax() == _NEVER):
                    failed[index] = "no token is left: the grammar allows none of the allow list"
                    logits[row] = 0.0
        for index, why in failed.items():
            bad.setdefault(int(rows[index]), (GRAMMAR_ERROR, why))

    def _penalise(self, logits: Tensor, batch: Batch, slots: Int64s, rows: Int64s) -> None:
        params, owners = batch.params, slots[rows]
        known, prompt = batch.num_tokens[owners], batch.num_prompt[owners]
        seen = self._counts(batch, owners, np.zeros_like(known), known, logits) > 0
        output = self._counts(batch, owners, prompt, known - prompt, logits)

        def column(values: npt.NDArray[np.float32]) -> Tensor:
            return torch.from_numpy(values[owners]).to(logits.device).unsqueeze(1)

        index = _on(rows, logits)
        part = logits[index]
        repetition = column(params.repetition)
        part = torch.where(seen, torch.where(part > 0, part / repetition, part * repetition), part)
        part -= column(params.frequency) * output + column(params.presence) * (output > 0)
        logits[index] = part

    def _counts(self, batch: Batch, owners: Int64s, begins: Int32s, lengths: Int32s, like: Tensor) -> Tensor:
        """How often each id occurs in tokens [begins, begins + lengths) of each owner: float32 [P, vocab]."""
        rows, offsets = spread(lengths)
        ids = batch.tokens[owners[rows], begins[rows] + offsets]
        counts = torch.zeros(len(owners) * self._vocab_size, dtype=torch.float32, device=like.device)
        flat = torch.from_numpy(rows * self._vocab_size + ids).to(like.device)
        counts.index_add_(0, flat, torch.ones(len(flat), dtype=torch.float32, device=like.device))
        return counts.view(len(owners), self._vocab_size)

    def _choose(self, logits: Tensor, batch: Batch, slots: Int64s) -> npt.NDArray[np.int32]:
        """Steps 8 to 12: a token for each row."""
        params = batch.params
        random = np.flatnonzero(params.temperature[slots] >= GREEDY_BELOW)
        if len(random) == 0:
            return logits.argmax(1).to(torch.int32).cpu().numpy()
        tokens = np.zeros(len(slots), np.int32)
        greedy = np.flatnonzero(params.temperature[slots] < GREEDY_BELOW)
        if len(greedy):
            tokens[greedy] = logits[_on(greedy, logits)].argmax(1).cpu().numpy()
        owners = slots[random]
        part = logits if len(random) == len(slots) else logits[_on(random, logits)]
        settings = _Settings.of(batch, owners, part)
        part /= settings.temperature.unsqueeze(1)
        keep_top_k(part, settings.top_k)
        keep_top_p(part, settings.top_p)
        keep_min_p(part, settings.min_p)
        positions = batch.num_tokens[owners]
        draws = torch.from_numpy(uniforms(params.seed[owners], params.choice[owners], positions)).to(part.device)
        tokens[random] = pick(part, draws).cpu().numpy()
        return tokens

    def _report(
        self, raw: Tensor, rows: Int64s, tokens: npt.NDArray[np.int32], batch: Batch, slots: Int64s, bad: Bad
    ) -> list[TokenLogprobs]:
        owners = slots[rows]
        asked = np.minimum(batch.params.logprobs[owners], self._vocab_size)
        chosen = raw.gather(1, torch.from_numpy(tokens[rows].astype(np.int64)).to(raw.device).unsqueeze(1))
        ranks = ranks_of(raw, chosen).cpu().numpy()
        own = chosen.flatten().clamp(min=LOGPROB_FLOOR).cpu().numpy()
        values, ids = raw.topk(max(int(asked.max()), 1), 1)
        best = values.clamp(min=LOGPROB_FLOOR).cpu().numpy().astype("<f4")
        best_ids = ids.cpu().numpy().astype("<i4")
        return [
            TokenLogprobs(
                int(batch.ids[slot]),
                int(batch.num_tokens[slot]),
                float(own[index]),
                int(ranks[index]),
                best_ids[index, : asked[index]].tobytes(),
                best[index, : asked[index]].tobytes(),
            )
            for index, slot in enumerate(owners.tolist())
            if int(rows[index]) not in bad
        ]


class _Allowed(NamedTuple):
    """`masks` [R, words] of rows [R] with a grammar; `failed`: an index among them -> why its row can't go on."""

    rows: Int64s
    masks: Uint32s | None
    failed: dict[int, str]


@dataclass(frozen=True, slots=True)
class _Settings:
    """Columns of the rows that draw, on the logits' device."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, batch: Batch, slots: Int64s, like: Tensor) -> _Settings:
        params = batch.params
        columns = (params.temperature, params.top_k, params.top_p, params.min_p)
        return cls(*(torch.from_numpy(column[slots]).to(like.device) for column in columns))


def keep_top_k(logits: Tensor, top_k: Tensor) -> None:
    """In place: mask [N, V] below each row's top_k-th value; top_k [N], 0 or ≥ V keeps all. Ties at the border stay."""
    width = logits.shape[1]
    limited = ((top_k > 0) & (top_k < width)).nonzero().flatten()
    if len(limited) == 0:
        return
    part = logits[limited]
    # numpy selects and sorts float32 with vector instructions; torch's topk and sort on the CPU take ten times as long.
    ranks = (width - top_k[limited]).tolist()
    borders = [np.partition(row, rank)[rank] for row, rank in zip(part.cpu().numpy(), ranks, strict=True)]
    logits[limited] = part.masked_fill(part < _column(borders, part), _NEVER)


def keep_top_p(logits: Tensor, top_p: Tensor) -> None:
    """In place: keep the most likely ids of [N, V] whose probabilities first reach top_p [N]; at least one, and ties.

    An id stays while the probability of all likelier ids is below top_p.
    """
    limited = (top_p < 1).nonzero().flatten()
    if len(limited) == 0:
        return
    part = logits[limited]
    weights = exponentials(part - part.amax(1, keepdim=True))
    # Not one long sum: how that is cut may depend on how many rows there are, and a row must not know its neighbours.
    totals = _in_runs(weights).sum(2).double().cumsum(1)[:, -1].tolist()
    wanted = top_p[limited].double().tolist()
    borders = [_nucleus(*row) for row in zip(weights.cpu().numpy(), totals, wanted, strict=True)]
    logits[limited] = part.masked_fill(weights < _column(borders, part), _NEVER)


def _nucleus(weights: npt.NDArray[np.float32], total: float, top_p: float) -> np.float32:
    """The smallest weight in the nucleus of one row, weights [V] summing to `total`."""
    # Ids below this share hold at most 1 - top_p together, all of them: the border is among the others.
    candidates = np.sort(weights[weights > (1 - top_p) * total / len(weights)])[::-1]
    before = candidates.cumsum(dtype=np.float64) - candidates
    return np.float32(candidates[max(int(np.count_nonzero(before < top_p * total)) - 1, 0)])


def _column(values: list[np.float32], like: Tensor) -> Tensor:
    return torch.from_numpy(np.array(values, np.float32)).to(like.device).unsqueeze(1)


def keep_min_p(logits: Tensor, min_p: Tensor) -> None:
    """In place: mask ids of [N, V] whose probability is below min_p [N] times that of the likeliest."""
    limited = (min_p > 0).nonzero().flatten()
    if len(limited) == 0:
        return
    part = logits[limited]
    threshold = part.amax(1, keepdim=True) + min_p[limited].clamp(max=1).log().unsqueeze(1)
    logits[limited] = part.masked_fill(part < threshold, _NEVER)


def ranks_of(values: Tensor, chosen: Tensor) -> Tensor:
    """For each row of float32 values [N, V], 1 + how many are above chosen [N, 1]: int32 [N]."""
    # A comparison as float32: to add booleans up takes torch fifteen times as long on a CPU.
    return torch.gt(values, chosen, out=torch.empty_like(values)).sum(1).to(torch.int32) + 1


def pick(logits: Tensor, draws: Tensor) -> Tensor:
    """Inverse CDF in id order: logits [N, V] (masked: -inf), draws float64 [N] in [0, 1) -> ids int64 [N].

    Never an id of probability 0, whatever the rounding.
    """
    weights = _in_runs(exponentials(logits - logits.amax(1, keepdim=True)))
    sums = weights.sum(2).double()
    run, start = _invert(sums, draws * sums.cumsum(1)[:, -1])
    rows = torch.arange(len(run), device=run.device)
    offset, _ = _invert(weights[rows, run].double(), start)
    return run * _RUN + offset


def exponentials(exponents: Tensor) -> Tensor:
    """e to these, all ≤ 0, in place. On a CPU what would be below 2e-38, about the least normal float32, is 0."""
    if exponents.device.type != "cpu":
        return exponents.exp_()
    # Where the result is subnormal or 0, as of everything masked, the CPU's exp takes 5 to 30 times as long.
    return torch.threshold_(exponents.clamp_(min=-87.0).exp_(), 2e-38, 0.0)


def _invert(weights: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """weights [N, K] ≥ 0, wanted [N] -> (the first index whose running sum exceeds it, what is left of it there)."""
    running = weights.cumsum(1)
    wanted = wanted.clamp(min=0).unsqueeze(1)
    index = torch.searchsorted(running, wanted, right=True)
    last = torch.searchsorted(running, running[:, -1:].contiguous(), right=False)  # the last one with any weight
    index = torch.minimum(index, last)
    return index.squeeze(1), (wanted - running.gather(1, index) + weights.gather(1, index)).squeeze(1)


def _in_runs(values: Tensor) -> Tensor:
    """[N, V] -> [N, C, 256], padded with zeros: sums over runs vectorise where one long running sum does not."""
    missing = -values.shape[1] % _RUN
    padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
    return padded.view(len(values), -1, _RUN)


def _on(index: npt.NDArray[np.integer], like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(index, np.int64)).to(like.device)

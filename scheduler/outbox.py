"""What the APIs have to be told, gathered per peer so that each gets at most one message per step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from protocol.columns import pack_u64
from protocol.messages import Finished, Outputs, PromptLogprobs, Rejected, TokenLogprobs


@dataclass(slots=True)
class _Parcel:
    ids: list[bytes] = field(default_factory=list)
    positions: list[bytes] = field(default_factory=list)
    tokens: list[bytes] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)


class Outbox:
    """Collects events by peer; `take` turns them into messages and starts anew."""

    def __init__(self) -> None:
        self._parcels: dict[int, _Parcel] = {}

    def of(self, peer: int) -> _Parcel:
        """The open parcel of a peer."""
        parcel = self._parcels.get(peer)
        if parcel is None:
            parcel = self._parcels[peer] = _Parcel()
        return parcel

    def add_tokens(
        self,
        peers: npt.NDArray[np.int32],
        ids: npt.NDArray[np.uint64],
        positions: npt.NDArray[np.int32],
        tokens: npt.NDArray[np.int32],
    ) -> None:
        """One token for each of R requests; all arrays are [R], `positions` count a request's outputs from 0."""
        if not len(peers):
            return
        first = int(peers[0])
        alone = np.count_nonzero(peers == first) == len(peers)
        groups = [(first, slice(None))] if alone else [(int(p), peers == p) for p in np.unique(peers)]
        for peer, chosen in groups:
            parcel = self.of(peer)
            parcel.ids.append(ids[chosen].tobytes())
            parcel.positions.append(positions[chosen].tobytes())
            parcel.tokens.append(tokens[chosen].tobytes())

    def forget(self, peer: int) -> None:
        """Drop what an absent peer would have been told."""
        self._parcels.pop(peer, None)

    def take(self, epoch: int, step_id: int) -> list[tuple[int, Outputs]]:
        """One message per peer with anything to tell."""
        parcels, self._parcels = self._parcels, {}
        return [
            (
                peer,
                Outputs(
                    epoch=epoch,
                    step_id=step_id,
                    ids=b"".join(parcel.ids),
                    positions=b"".join(parcel.positions),
                    tokens=b"".join(parcel.tokens),
                    accepted=pack_u64(parcel.accepted),
                    rejected=parcel.rejected,
                    finished=parcel.finished,
                    logprobs=parcel.logprobs,
                    prompt_logprobs=parcel.prompt_logprobs,
                ),
            )
            for peer, parcel in parcels.items()
        ]

"""The running requests as columns: what every pass touches for every row, and nothing else.

A row's life in three counters:  computed <= min(target, final),  known <= target.

    tokens     0 ....... computed ........ known ......... target        total
               [ KV exists or is in flight ][ sampled, known ][ in flight ]   ends here at the latest

`target` counts the tokens that exist or will exist once the steps in flight are back; computing up to it samples one
more. The last token of a request is never computed, so `final = total - 1`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler.request import Request

SlotArray = npt.NDArray[np.intp]


class RowTable:
    """Columns indexed by slot. A slot belongs to one RUNNING request; `order` lists them in order of admission."""

    def __init__(self, capacity: int, block_size: int) -> None:
        self.capacity = capacity
        self.limit = capacity
        """Rows that may be in use; lowering it empties nothing, it only holds admissions."""
        self.id = np.zeros(capacity, np.uint64)
        self.incarnation = np.zeros(capacity, np.int32)
        self.prompt = np.zeros(capacity, np.int32)
        self.computed = np.zeros(capacity, np.int32)
        self.known = np.zeros(capacity, np.int32)
        self.target = np.zeros(capacity, np.int32)
        self.total = np.zeros(capacity, np.int32)
        self.final = np.zeros(capacity, np.int32)
        self.blocks = np.zeros(capacity, np.int32)
        self.sealed = np.zeros(capacity, np.int32)
        self.peer = np.zeros(capacity, np.int32)
        self.tenant = np.zeros(capacity, np.int32)
        self.priority = np.zeros(capacity, np.int64)
        self.arrival_ns = np.zeros(capacity, np.int64)
        self.first_ns = np.zeros(capacity, np.int64)
        """When the first output came; 0 before."""
        self.timely = np.zeros(capacity, np.bool_)
        """Whether it came in time for the objective."""
        self.heeds_eos = np.zeros(capacity, np.bool_)
        self.watched = np.zeros(capacity, np.bool_)
        self.live = np.zeros(capacity, np.bool_)
        self.sent = np.zeros(capacity, np.bool_)
        """Whether the runner has been told of the request: it is in the first step that computes some of it."""
        self.turn = np.zeros(capacity, np.int64)
        """Where the row stands among those that take turns: the smallest is first."""
        self._turns = 0
        self.tail = np.zeros((capacity, block_size), np.int32)
        self.request: list[Request | None] = [None] * capacity
        self.order: SlotArray = np.empty(0, np.intp)
        self._free = list(range(capacity - 1, -1, -1))

    def __len__(self) -> int:
        return self.capacity - len(self._free)

    def requests(self) -> list[Request]:
        """The running requests in order of admission."""
        found = (self.request[slot] for slot in self.order)
        return [request for request in found if request is not None]

    def enter(self, request: Request, computed: int, sealed: int, watched: bool, tenant: int) -> int:
        """Give a request a slot; `computed` of its tokens have KV already, in blocks of which the first `sealed` are
        findable. Returns the slot. An open request is computed up to, and without, its last known token: computing
        that one would sample.

        A `watched` request has stop conditions beyond the model's end tokens and its length: they are looked at one
        by one, so its end tokens are too.
        """
        slot = self._free.pop()
        known = request.num_tokens
        self.request[slot] = request
        request.slot = slot
        self.id[slot] = request.id
        self.incarnation[slot] = request.incarnation
        self.prompt[slot] = request.num_prompt
        self.computed[slot] = computed
        self.known[slot] = known
        self.target[slot] = known
        self.total[slot] = request.max_total
        self.final[slot] = (known if request.open else request.max_total) - 1
        self.blocks[slot] = len(request.blocks)
        self.sealed[slot] = sealed
        self.peer[slot] = request.peer
        self.tenant[slot] = tenant
        self.priority[slot] = request.priority
        self.arrival_ns[slot] = request.arrival_ns
        self.first_ns[slot] = request.first_token_ns
        self.timely[slot] = request.timely
        self.heeds_eos[slot] = not (watched or request.params.ignore_eos)
        self.watched[slot] = watched
        self.live[slot] = True
        self.sent[slot] = False
        self.to_the_back(slot)
        self.order = np.append(self.order, slot)
        return slot

    def to_the_back(self, slot: int) -> None:
        """The row's turn is behind all others."""
        self._turns += 1
        self.turn[slot] = self._turns

    def flush(self, slot: int) -> None:
        """Move the outputs that only the table holds into the request's data."""
        request = self.request[slot]
        assert request is not None
        synced, known = request.num_tokens, int(self.known[slot])
        if synced == known:
            return
        size = self.tail.shape[1]
        assert known - synced <= size, "the tail would have been overwritten before it was flushed"
        row, start, stop = self.tail[slot], synced % size, known % size
        if start < stop:
            request.data += row[start:stop].tobytes()
        else:  # up to the block's end, then what has wrapped to its front
            request.data += row[start:].tobytes()
            request.data += row[:stop].tobytes()

    def flush_many(self, slots: SlotArray) -> None:
        """`flush` for rows that, for the most part, have just filled a block: what they lack is its end."""
        width = self.tail.itemsize * self.tail.shape[1]
        tails, known = self.tail[slots].tobytes(), self.known[slots].tolist()
        for index, slot in enumerate(slots.tolist()):
            request = self.request[slot]
            assert request is not None
            data, end = request.data, 4 * known[index]
            if end % width == 0 and 0 < end - len(data) <= width:
                data += tails[index * width + len(data) % width : (index + 1) * width]
            else:
                self.flush(slot)

    def leave(self, slots: list[int]) -> None:
        """Flush and free these slots. `order` keeps its order."""
        for slot in slots:
            self.flush(slot)
            request = self.request[slot]
            assert request is not None
            request.slot = -1
            self.request[slot] = None
            self.live[slot] = False
            self._free.append(slot)
        self.order = self.order[self.live[self.order]]

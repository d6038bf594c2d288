"""A strict watcher of the paging rules: who holds which page, and how much of each page was ever written.

It knows nothing of hashes or tensors. The simulator runs it on every step, so that a scheduler's mistake is named in
the step that makes it instead of showing up as wrong text under load.
"""

from __future__ import annotations

import numpy as np

from protocol.messages import Limits
from runner.batch import Batch, Int32s, Rows, StepError, written_pages

PAGE_CONFLICT = "page_conflict"
UNWRITTEN_PAGE = "unwritten_page"


class PageChecker:
    """Counts live holders (requests, transfers) and written tokens of every page. StepError names a fault."""

    def __init__(self, limits: Limits) -> None:
        self._page_size = limits.block_size
        self._holders = np.zeros(limits.num_blocks, np.int32)
        self._written = np.zeros(limits.num_blocks, np.int32)
        self._host_written = np.zeros(limits.host_blocks, np.int32)
        self._swapped_in = np.zeros(limits.num_blocks, np.bool_)
        self._arrivals: list[tuple[int, int, Int32s]] = []

    def clear(self) -> None:
        """All residents are gone; the pages keep their content."""
        self._holders[:] = 0
        self._arrivals.clear()

    def swapped(self, out: Int32s, back: Int32s) -> None:
        """The step's copies, [n, 2] each (device page, host page), after what `left` released. Starts a step."""
        self._arrivals.clear()
        self._swapped_in[:] = False
        if len(out):
            self._host_written[out[:, 1]] = self._written[out[:, 0]]
        if len(back):
            pages = back[:, 0]
            self._refuse(pages[self._holders[pages] > 0], PAGE_CONFLICT, "swap-in into page {}, which is in use")
            self._written[pages] = self._host_written[back[:, 1]]
            self._swapped_in[pages] = True

    def admitted(self, request: int, num_computed: int, pages: Int32s) -> None:
        """A request arrives with its page table; pages past the computed ones must be free and become its own."""
        cached = num_computed // self._page_size
        owned = pages[cached:]
        taken = owned[self._holders[owned] > 0]
        np.add.at(self._holders, pages, 1)
        self._refuse(taken, PAGE_CONFLICT, f"request {request} is given page {{}}, which a request or transfer holds")
        doubled = pages[self._holders[pages] > 1] if len(np.unique(pages)) != len(pages) else pages[:0]
        self._refuse(doubled, PAGE_CONFLICT, f"request {request} holds page {{}} twice")
        self._written[owned[~self._swapped_in[owned]]] = 0
        self._arrivals.append((request, num_computed, pages.copy()))

    def grown(self, pages: Int32s) -> None:
        """These pages were appended to page tables; each must be free."""
        taken = pages[self._holders[pages] > 0]
        np.add.at(self._holders, pages, 1)
        self._refuse(taken, PAGE_CONFLICT, "a request grows by page {}, which a request or transfer holds")
        self._refuse(pages[self._holders[pages] > 1], PAGE_CONFLICT, "page {} is handed out twice in one step")
        self._written[pages] = 0

    def released(self, pages: Int32s) -> None:
        """A request that held these pages is gone."""
        np.subtract.at(self._holders, pages, 1)

    def transfer_began(self, request: int, pages: Int32s) -> None:
        """A transfer writes these pages from now on; they must be free, and count as held and unwritten."""
        taken = pages[self._holders[pages] > 0]
        np.add.at(self._holders, pages, 1)
        self._refuse(taken, PAGE_CONFLICT, f"the KV of request {request} is fetched into page {{}}, which is in use")
        self._written[pages] = 0

    def transfer_ended(self, pages: Int32s, num_tokens: int) -> None:
        """The transfer has filled the first `num_tokens` slots of its pages (none, if negative) and leaves them."""
        np.subtract.at(self._holders, pages, 1)
        starts = np.arange(len(pages), dtype=np.int32) * self._page_size
        self._written[pages] = np.clip(num_tokens - starts, 0, self._page_size)

    def voided(self, pages: Int32s) -> None:
        """The content of these pages is not to be trusted."""
        self._written[pages] = 0

    def check_step(self, batch: Batch, rows: Rows) -> None:
        """The step's writes leave no gap, and what its arrivals read was written.

        A row writes past its computed tokens only, so into pages that it was given for its own: that nobody else held
        them was checked then. Others may hold such a page since, to read it once it is full. Reads are judged after
        the writes: in each layer a step writes all its K/V before any row attends.
        """
        pages, offsets = written_pages(batch, rows)
        firsts = np.cumsum(rows.counts) - rows.counts
        gap = self._written[pages[firsts]] < offsets[firsts]
        self._refuse(pages[firsts][gap], UNWRITTEN_PAGE, "page {} is written past its end: tokens before are missing")
        self._written[pages] = offsets + 1
        for request, num_computed, table in self._arrivals:
            full, rest = divmod(num_computed, self._page_size)
            what = f"request {request} counts on page {{}}, which was not written that far"
            self._refuse(table[:full][self._written[table[:full]] < self._page_size], UNWRITTEN_PAGE, what)
            if rest:
                last = table[full : full + 1]
                self._refuse(last[self._written[last] < rest], UNWRITTEN_PAGE, what)

    @staticmethod
    def _refuse(wrong: Int32s, code: str, what: str) -> None:
        if len(wrong):
            raise StepError(code, what.format(int(wrong[0])))

"""Which page holds which block: the runner's memory of hashes, outliving any scheduler. It decides nothing.

A page's entry appears when the step that filled it has run, and leaves when the page is handed to a new owner. A
page whose computation failed is *voided*: whoever counts on its content would read garbage, so such a step fails.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

HASH_BYTES = 16

Pages = npt.NDArray[np.integer]


class Inventory:
    """Hashes per page, as columns. `num_blocks` includes the null page 0."""

    def __init__(self, num_blocks: int) -> None:
        self._hashes = np.zeros((num_blocks, HASH_BYTES), np.uint8)
        self._known = np.zeros(num_blocks, np.bool_)
        self._voided = np.zeros(num_blocks, np.bool_)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._known))

    def handed_over(self, pages: Pages) -> None:
        """These pages get a new owner that will overwrite them: what they held is gone."""
        self._known[pages] = False
        self._voided[pages] = False

    def filled(self, pages: Pages, hashes: npt.NDArray[np.uint8]) -> None:
        """These pages ([n]) now hold the blocks with these hashes ([n, 16])."""
        self._hashes[pages] = hashes
        self._known[pages] = True

    def take_back(self, pages: Pages) -> None:
        """Forget the hashes of these pages, whatever they hold."""
        self._known[pages] = False

    def void(self, pages: Pages) -> None:
        """The content of these pages can't be trusted: their computation failed."""
        self._known[pages] = False
        self._voided[pages] = True

    def voided(self, pages: Pages) -> Pages:
        """Those of `pages` whose content can't be trusted."""
        return pages[self._voided[pages]]

    def export(self) -> tuple[bytes, bytes]:
        """(page ids as an i32 column, their hashes one after the other), as a Welcome carries them.

        One hash may appear on several pages: requests that computed the same block at the same time.
        """
        pages = np.flatnonzero(self._known)
        return pages.astype("<i4").tobytes(), self._hashes[pages].tobytes()

"""Pages of a row whose attention sees a window: those of the sinks stay, the others are used again in turn.

However long the row becomes it holds `size` pages. The page of a new position is the one whose positions fell behind
the window longest ago, so a step of up to `most` tokens overwrites nothing that one of its queries sees. The device is
told by the page table alone, in which the same pages come round and round.
"""

from collections.abc import Sequence as Pages
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Ring:
    fixed: int
    turning: int

    @classmethod
    def of(cls, window: int, sinks: int, page_size: int, most: int) -> "Ring":
        """For steps of up to `most` tokens of a row; all in tokens."""
        return cls(-(-sinks // page_size), -(-(window + most - 2) // page_size) + 1)

    @property
    def size(self) -> int:
        return self.fixed + self.turning

    def table(self, pages: Pages[int], width: int) -> NDArray[np.int32]:
        """[width] the page of each place of a row that holds `pages`, all `size` of them."""
        places = np.arange(width)
        turns = self.fixed + (places - self.fixed) % self.turning
        return np.array(pages, np.int32)[np.where(places < self.fixed, places, turns)]

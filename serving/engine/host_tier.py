"""KV pages in host memory, by the same keys as on the device: what the device let go and may want again.

Bounded in bytes; the page that was used longest ago goes first. A pinned page stays until it is unpinned: it is the
only lasting copy of a profile's. Any thread may call. Invariant: `num_bytes` never exceeds the capacity.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Content = NDArray[np.uint8]  # [page_bytes] one page, all layers


class HostTier:
    """`capacity_bytes` 0: nothing is ever taken."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._loose: OrderedDict[bytes, Content] = OrderedDict()  # the longest unused first
        self._fixed: dict[bytes, Content] = {}
        self._pins: Counter[bytes] = Counter()
        self._pinned_by: dict[object, tuple[bytes, ...]] = {}
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def __contains__(self, key: bytes) -> bool:
        return key in self._fixed or key in self._loose

    def put(self, key: bytes, content: Content) -> bool:
        """Keep a copy; False where pinned pages leave no room. What is there already stays."""
        with self._lock:
            if key in self:
                return True
            while self._num_bytes + content.nbytes > self.capacity_bytes and self._loose:
                self._num_bytes -= self._loose.popitem(last=False)[1].nbytes
            if self._num_bytes + content.nbytes > self.capacity_bytes:
                return False
            (self._fixed if key in self._pins else self._loose)[key] = content.copy()
            self._num_bytes += content.nbytes
            return True

    def count(self, keys: Sequence[bytes]) -> int:
        """Length of the longest prefix of `keys` that is here; no use of it."""
        return next((i for i, key in enumerate(keys) if key not in self), len(keys))

    def match(self, keys: Sequence[bytes]) -> list[Content]:
        """The pages of the longest prefix of `keys` that is here: used now, a chain's head last."""
        with self._lock:
            known = keys[: self.count(keys)]
            for key in reversed(known):
                if key in self._loose:
                    self._loose.move_to_end(key)
            return [self._fixed[key] if key in self._fixed else self._loose[key] for key in known]

    def pin(self, owner: object, keys: Iterable[bytes]) -> None:
        """From now on, or from when they come, these stay until `owner` unpins them. Nothing if it has pinned some."""
        with self._lock:
            if owner in self._pinned_by:
                return
            self._pinned_by[owner] = tuple(keys)
            for key in self._pinned_by[owner]:
                self._pins[key] += 1
                if key in self._loose:
                    self._fixed[key] = self._loose.pop(key)

    def unpin(self, owner: object) -> None:
        """What `owner` pinned, if anything."""
        with self._lock:
            for key in self._pinned_by.pop(owner, ()):
                self._pins[key] -= 1
                if self._pins[key] == 0:
                    del self._pins[key]
                    if key in self._fixed:
                        self._loose[key] = self._fixed.pop(key)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Drop those that are not pinned."""
        with self._lock:
            for key in keys:
                content = self._loose.pop(key, None)
                self._num_bytes -= 0 if content is None else content.nbytes

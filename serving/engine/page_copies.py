"""Copies KV pages out of the device's pools and into them: two programs beside the buckets' own, compiled at warm-up.

Both move PAGES_AT_ONCE pages; what lacks is page 0, which belongs to nobody. Between them and the host a page is bytes:
its part of every layer's pool, one after the other. Invariant: the pools that go into a write are donated, so whoever
calls keeps what comes out and nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from numpy.typing import NDArray

from model.cache import Pool
from serving.batch import PAGES_AT_ONCE

Pools = tuple[Pool, ...]


class PageCopies:
    """`sharding`: how small arrays lie on the devices; None: on the one there is. All pools have one dtype."""

    def __init__(self, pools: Pools, sharding: Sharding | None) -> None:
        self._sharding, self._dtype = sharding, np.dtype(pools[0].dtype)
        self._numel = sum(pool.size // len(pool) for pool in pools)
        ids = jax.ShapeDtypeStruct((PAGES_AT_ONCE,), np.int32, sharding=sharding)
        rows = jax.ShapeDtypeStruct((PAGES_AT_ONCE, self._numel), self._dtype, sharding=sharding)
        self._read: Callable[..., jax.Array] = jax.jit(_gather, out_shardings=sharding).lower(pools, ids).compile()
        writes = jax.jit(_scatter, out_shardings=sharding, donate_argnums=(0,))
        self._write: Callable[..., Pools] = writes.lower(pools, ids, rows).compile()

    def read(self, pools: Pools, pages: Sequence[int]) -> "PagesOut":
        """Dispatch; the copy to the host starts at once."""
        rows = self._read(pools, *self._placed(_padded(pages)))
        rows.copy_to_host_async()
        return PagesOut(rows, len(pages))

    def write(self, pools: Pools, pages: Sequence[int], content: NDArray[np.uint8]) -> Pools:
        """`content` [pages, page_bytes]; `pools` is gone afterwards."""
        rows = np.zeros((PAGES_AT_ONCE, self._numel), self._dtype)
        rows[: len(pages)] = np.ascontiguousarray(content).view(self._dtype)
        return self._write(pools, *self._placed(_padded(pages), rows))

    def _placed(self, *arrays: Any) -> Any:
        return arrays if self._sharding is None else jax.device_put(arrays, self._sharding)


@dataclass(frozen=True, slots=True)
class PagesOut:
    """Implements serving.batch.PendingPages."""

    rows: jax.Array
    num_pages: int

    def done(self) -> bool:
        return bool(self.rows.is_ready())  # type: ignore[attr-defined]  # missing from jax.Array's declaration

    def result(self) -> NDArray[np.uint8]:
        return np.ascontiguousarray(np.asarray(self.rows)[: self.num_pages]).view(np.uint8)


def _padded(pages: Sequence[int]) -> NDArray[np.int32]:
    return np.array([*pages, *[0] * (PAGES_AT_ONCE - len(pages))], np.int32)


def _gather(pools: Pools, ids: jax.Array) -> jax.Array:
    """[PAGES_AT_ONCE, numbers of a page]"""
    return jnp.concatenate([pool[ids].reshape(len(ids), -1) for pool in pools], axis=1)


def _scatter(pools: Pools, ids: jax.Array, rows: jax.Array) -> Pools:
    sizes = [pool.size // len(pool) for pool in pools]
    parts = jnp.split(rows, np.cumsum(sizes)[:-1].tolist(), axis=1)
    written = (
        pool.at[ids].set(part.reshape(len(ids), *pool.shape[1:])) for pool, part in zip(pools, parts, strict=True)
    )
    return tuple(written)

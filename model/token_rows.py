"""A step's tokens as rows of one token each, the real ones first: what the deterministic arithmetic computes on.

A chunk of t tokens of b sequences becomes n = b * t rows that share their sequences' pages, so that prefill, decode and
scoring are one computation, and tiles that hold padding alone are never run.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from .cache import PageView


class TokenRows(NamedTuple):
    """Row i is token order[i] of the flattened step; `view` has n rows of one token."""

    order: Int[Array, " n"]
    view: PageView

    @classmethod
    def of(cls, view: PageView) -> "TokenRows":
        valid, width = view.valid.reshape(-1), view.positions.shape[1]
        order = jnp.argsort(~valid, stable=True)
        real = valid[order]
        positions = jnp.where(real, view.positions.reshape(-1)[order], 0)  # padding sees one key
        return cls(order, PageView(view.page_table[order // width], positions[:, None], real.astype(jnp.int32)))

    @property
    def num_real(self) -> Int[Array, ""]:
        """Real tokens."""
        return self.view.length.sum()

    def take(self, values: Shaped[Array, "b t *rest"]) -> Shaped[Array, "n 1 *rest"]:
        return values.reshape(-1, 1, *values.shape[2:])[self.order]

    def put(self, rows: Shaped[Array, "n 1 *rest"], shape: tuple[int, ...]) -> Shaped[Array, "b t *rest"]:
        """Back in the places of a step of shape (b, t)."""
        return jnp.zeros_like(rows).at[self.order].set(rows).reshape(*shape, *rows.shape[2:])


def unpaged_view(shape: tuple[int, ...], length: Int[Array, " b"], page_size: int) -> tuple[PageView, int]:
    """Whole sequences of shape (b, t) from position 0 in pages of their own, and how many pages that takes."""
    rows, tokens = shape
    pages = -(-tokens // page_size)
    table = 1 + jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages)
    positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), shape)
    return PageView(table, positions, length), 1 + rows * pages

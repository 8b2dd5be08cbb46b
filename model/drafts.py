"""Drafts of the tokens that rows will have next, by the MTP layer (arXiv:2412.19437 section 2.2), and its cache.

The layer makes of the main model's state at a position and the token after it a guess of the token after that; its own
attention needs keys and values of every position before. So each step writes these for the tokens that it adds. At the
end of a page that another prompt shares, the token after it may be another one: a guess suffers by that, never an
answer.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .adjust import Adjust, Tables, adjusted
from .cache import PageView, Pool
from .sampling import Sampling, guess
from .transformer import Transformer


class Drafts(NamedTuple):
    """What the device alone knows while steps that may accept a draft are on their way, by slot."""

    position: Int[Array, " slots"]  # of the last token
    token: Int[Array, " slots"]  # a guess of the one after it; -1: none

    def at(self, slot: Int[Array, " b"], live: Bool[Array, " b"]) -> tuple[Int[Array, " b"], Int[Array, " b"]]:
        """Position and draft of a step's rows; padding is at 0."""
        return jnp.where(live, self.position[slot], 0), self.token[slot]

    def put(
        self, slot: Int[Array, " b"], live: Bool[Array, " b"], position: Int[Array, " b"], token: Int[Array, " b"]
    ) -> "Drafts":
        return Drafts(
            self.position.at[slot].set(jnp.where(live, position, 0)),
            self.token.at[slot].set(jnp.where(live, token, -1)),
        )


class Newest(NamedTuple):
    """The newest token of each row, and what it takes to guess the next one."""

    hidden: Float[Array, "b 1 d"]  # the main model's state at the position before it
    token: Int[Array, " b"]
    position: Int[Array, " b"]
    page_table: Int[Array, "b pages"]
    live: Bool[Array, " b"]


def draft_next(
    model: Transformer, newest: Newest, pool: Pool, sampling: Sampling, adjust: Adjust | None, tables: Tables | None
) -> tuple[Int[Array, " b"], Pool]:
    """The layer for one position of each row, whose keys and values it writes (again)."""
    view = PageView(newest.page_table, newest.position[:, None] - 1, newest.live.astype(jnp.int32))
    x, pool = model.mtp_paged(newest.hidden, newest.token[:, None], view, pool)
    logits = model.logits(x[:, 0])
    if tables is not None and adjust is not None:
        logits = adjusted(logits, tables, adjust)
    return guess(logits, sampling, newest.position + 1), pool

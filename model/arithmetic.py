"""How a step's numbers are made: as fast as its shape allows, or with the same bits at any shape.

A compiler gives one row of a product, a reduction or a chain of elementwise steps the same bits at a fixed shape,
whatever the row's place and neighbours are, and other bits at another number of rows: another kernel, another split,
another fusion. The deterministic arithmetic therefore has one shape. `rows` cuts whatever is computed row by row into
tiles of `tile_rows` rows and runs them in a loop whose length the compiler cannot know, so that every program has the
same loop body. Attention sees every token as a row of its own and walks its keys in blocks of `key_block`
(model/key_blocks.py); the experts take one form. The fast arithmetic runs what it is given as it comes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

Out = TypeVar("Out")


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Held by a Transformer. `moe_impl`, `attention_impl`: the forms of the experts (kernels_pallas.grouped_matmul) and
    of attention's kernels (kernels_pallas.dispatch). tile_rows 0: fast."""

    moe_impl: str = "auto"
    attention_impl: str = "auto"
    tile_rows: int = 0
    key_block: int = 0

    @property
    def deterministic(self) -> bool:
        return self.tile_rows > 0

    def fixed(self, *, tile_rows: int = 16, key_block: int = 64) -> "Arithmetic":
        """The deterministic form of this one: "loop" for the experts, which reads only those that a tile uses."""
        moe_impl = "loop" if self.moe_impl == "auto" else self.moe_impl
        return replace(self, moe_impl=moe_impl, tile_rows=tile_rows, key_block=key_block)

    def rows(self, function: Callable[..., Out], *rows: Any, count: Int[Array, ""] | None = None) -> Out:
        """`function(*rows)`, where every array in `rows` and in the result has one leading axis [n, ...].

        Row i of the result must depend on row i of the arguments alone. `count`: rows from there on may be skipped;
        what they give is then zero.
        """
        if not self.deterministic:
            return function(*rows)
        return _tiled(function, self.tile_rows, count, rows)


FAST = Arithmetic()
PARTITIONED = Arithmetic(moe_impl="dense", attention_impl="xla")  # what the compiler can cut up over a mesh


def unknown(number: Int[Array, ""] | int) -> Int[Array, ""]:
    """The number as something that the compiler cannot know: a loop of one known turn would be unrolled, and its body
    fused with what surrounds it."""
    hidden: Int[Array, ""] = jax.lax.optimization_barrier(jnp.int32(number))
    return hidden


def _tiled(function: Callable[..., Out], size: int, count: Int[Array, ""] | None, rows: tuple[Any, ...]) -> Out:
    total = len(jax.tree.leaves(rows)[0])
    num_tiles = max(2, -(-total // size))  # the only tile would not change from turn to turn: hoisted, fused otherwise

    def cut(array: jax.Array) -> jax.Array:
        padding = [(0, num_tiles * size - total)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, padding).reshape(num_tiles, size, *array.shape[1:])

    tiles = jax.tree.map(cut, rows)

    def tile(index: jax.Array | int) -> Any:
        return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index, keepdims=False), tiles)

    def body(index: jax.Array, out: Any) -> Any:
        new = function(*tile(index))
        return jax.tree.map(lambda all_, one: jax.lax.dynamic_update_index_in_dim(all_, one, index, 0), out, new)

    shapes = jax.eval_shape(lambda: function(*tile(0)))
    out = jax.tree.map(lambda s: jnp.zeros((num_tiles, *s.shape), s.dtype), shapes)
    out = jax.lax.fori_loop(0, unknown(-(-(total if count is None else count) // size)), body, out)
    joined: Out = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:total], out)
    return joined

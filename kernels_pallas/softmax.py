"""Softmax over the last axis in mixed precision: 16 bits or float32 in and out, float32 in between.

    y[i] = exp(x[i] - top) / sum_j exp(x[j] - top)

over the entries that are not masked, with top their maximum, exact: nothing is rounded before it is found, so that
logits of 6e4 are as good as small ones. What is masked, or -inf, gives 0, whatever it is; a row of nothing else gives
zeros, and no gradient. NaN elsewhere stays NaN. dx[i] = y[i] (dy[i] - sum_j y[j] dy[j]), from y alone.

For rows such as [tokens, vocabulary] and [b, h, t, s]. A program of the kernel has one block of BLOCK entries: several
short rows, or a part of a long one, which it then walks twice, for its maximum and sum (online, arXiv:1805.02867) and
for its result. Numbers cross memory in 16 bits. XLA's own form is the reference, which it fuses.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .dispatch import Impl, kernel_options, resolve
from .tiles import Ref, count, load, power_of_two, store

BLOCK = 4096
LOWEST, TINY = float(jnp.finfo(jnp.float32).min), float(jnp.finfo(jnp.float32).tiny)
Numbers = TypeVar("Numbers")
Total = TypeVar("Total")


def softmax_reference(x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    scores = x.astype(jnp.float32) if mask is None else jnp.where(mask, x.astype(jnp.float32), -jnp.inf)
    top = jnp.maximum(scores.max(-1, keepdims=True), LOWEST)  # -inf - -inf would be NaN
    weights = jnp.exp(scores - top)
    return (weights / jnp.maximum(weights.sum(-1, keepdims=True), TINY)).astype(x.dtype)


def _gradient_reference(y: jax.Array, dy: jax.Array) -> jax.Array:
    weights, grad = y.astype(jnp.float32), _of_use(y, dy)
    return (weights * (grad - (weights * grad).sum(-1, keepdims=True))).astype(y.dtype)


def _of_use(y: jax.Array, dy: jax.Array) -> jax.Array:
    """dy in f32, where anything hangs on it: elsewhere it may be NaN, and 0 * NaN is NaN."""
    return jnp.where(y == 0, 0, dy.astype(jnp.float32))


class _Rows(NamedTuple):
    """A program's rows of an array [num_rows, width], which are cut into blocks of columns."""

    row: jax.Array  # [r, 1]
    num_rows: int
    width: int
    block: int

    @classmethod
    def here(cls, ref: Ref) -> "_Rows":
        num_rows, width = ref.shape
        rows, block = _sizes(width)
        return cls(count(rows, pl.program_id(0) * rows)[:, None], num_rows, width, block)

    def at(self, index: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """Columns [1, block] of a block, and what of it is there [r, block]."""
        column = count(self.block, index * self.block)[None, :]
        return column, (self.row < self.num_rows) & (column < self.width)

    def load(self, ref: Ref, index: jax.Array | int) -> jax.Array:
        column, there = self.at(index)
        return load(ref, self.row, column, mask=there)

    def walk_twice(
        self,
        read: Callable[[jax.Array | int], Numbers],
        gather: Callable[[Total, Numbers], Total],
        total: Total,
        result: Callable[[Numbers, Total], jax.Array],
        out_ref: Ref,
    ) -> None:
        """Write the result of each block, once the total of all is gathered."""

        def write(index: jax.Array | int, numbers: Numbers, total: Total) -> None:
            column, there = self.at(index)
            store(out_ref, self.row, column, value=result(numbers, total), mask=there)

        def again(index: jax.Array, _: None) -> None:
            write(index, read(index), total)

        blocks = pl.cdiv(self.width, self.block)
        if blocks == 1:
            numbers = read(0)
            write(0, numbers, gather(total, numbers))
            return
        total = jax.lax.fori_loop(0, blocks, lambda index, total: gather(total, read(index)), total)
        jax.lax.fori_loop(0, blocks, again, None)


def _sizes(width: int) -> tuple[int, int]:
    """Rows and columns of a block."""
    columns = min(power_of_two(width), BLOCK)
    return BLOCK // columns, columns


def _kernel(x_ref: Ref, *others: Ref, lead: tuple[int, ...], mask_lead: tuple[int, ...]) -> None:
    """Between x_ref and out_ref there may be the mask, whose rows are those of the axes mask_lead."""
    *mask_refs, out_ref = others
    rows = _Rows.here(x_ref)

    def read(index: jax.Array | int) -> jax.Array:
        column, seen = rows.at(index)
        for mask_ref in mask_refs:
            seen = seen & load(mask_ref, _mask_row(rows.row, lead, mask_lead), column, mask=seen)
        return jnp.where(seen, rows.load(x_ref, index).astype(jnp.float32), -jnp.inf)

    def gather(total: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
        top = jnp.maximum(total[0], x.max(1, keepdims=True))
        return top, total[1] * jnp.exp(total[0] - top) + jnp.exp(x - top).sum(1, keepdims=True)

    def result(x: jax.Array, total: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.exp(x - total[0]) / jnp.maximum(total[1], TINY)

    nothing = jnp.full(rows.row.shape, LOWEST, jnp.float32), jnp.zeros(rows.row.shape, jnp.float32)
    rows.walk_twice(read, gather, nothing, result, out_ref)


def _mask_row(row: jax.Array, lead: tuple[int, ...], mask_lead: tuple[int, ...]) -> jax.Array:
    """Which of a mask's rows goes with a row, where the mask's axes are as long as the array's, or 1."""
    mask_row, stride = jnp.zeros_like(row), 1
    for size, own in zip(reversed(lead), reversed(mask_lead), strict=True):
        if own > 1:
            mask_row, stride = mask_row + jax.lax.rem(row, size) * stride, stride * own
        row = jax.lax.div(row, size)
    return mask_row


def _gradient_kernel(y_ref: Ref, dy_ref: Ref, dx_ref: Ref) -> None:
    rows = _Rows.here(y_ref)

    def read(index: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        y = rows.load(y_ref, index)
        return y.astype(jnp.float32), _of_use(y, rows.load(dy_ref, index))

    def gather(total: jax.Array, block: tuple[jax.Array, jax.Array]) -> jax.Array:
        return total + (block[0] * block[1]).sum(1, keepdims=True)

    def result(block: tuple[jax.Array, jax.Array], total: jax.Array) -> jax.Array:
        return block[0] * (block[1] - total)

    rows.walk_twice(read, gather, jnp.zeros(rows.row.shape, jnp.float32), result, dx_ref)


def softmax(x: jax.Array, mask: jax.Array | None = None, *, impl: str = "auto") -> jax.Array:
    """x [..., n] float32, bfloat16 or float16, mask bool that broadcasts to it, True where an entry counts -> x's shape
    and dtype. Differentiable in x, in reverse and once. `impl`: "auto", "xla", "pallas" or "interpret". Raises
    ValueError for another one, and for a mask that does not broadcast to x."""
    if mask is not None and jnp.broadcast_shapes(mask.shape, x.shape) != x.shape:
        raise ValueError(f"a mask of shape {mask.shape} does not broadcast to {x.shape}")
    return _softmax(resolve(impl), x, mask)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _softmax(impl: Impl, x: jax.Array, mask: jax.Array | None) -> jax.Array:
    if impl == "xla" or x.size == 0:
        return softmax_reference(x, mask)
    lead, width = x.shape[:-1], x.shape[-1]
    arrays, mask_lead = [x], lead
    if mask is not None:
        mask = mask.reshape((1,) * (x.ndim - mask.ndim) + mask.shape)
        mask_lead = mask.shape[:-1]
        arrays.append(jnp.broadcast_to(mask, (*mask_lead, width)))
    return _call(impl, partial(_kernel, lead=lead, mask_lead=mask_lead), "softmax", *arrays)


def _forward(impl: Impl, x: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    y = _softmax(impl, x, mask)
    return y, y


def _backward(impl: Impl, y: jax.Array, dy: jax.Array) -> tuple[jax.Array, None]:
    if impl == "xla" or y.size == 0:
        return _gradient_reference(y, dy), None
    return _call(impl, _gradient_kernel, "softmax_gradient", y, dy), None


_softmax.defvjp(_forward, _backward)


def _call(impl: Impl, kernel: Callable[..., None], name: str, *arrays: jax.Array) -> jax.Array:
    """Of arrays as rows; the result is like the first."""
    first, *others = (x.reshape(-1, x.shape[-1]) for x in arrays)
    rows, _ = _sizes(first.shape[1])
    return pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct(first.shape, first.dtype),
        grid=(pl.cdiv(len(first), rows),),
        name=name,
        **kernel_options(impl, num_warps=8, num_stages=2),
    )(first, *others).reshape(arrays[0].shape)

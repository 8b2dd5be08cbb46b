"""y = x W^T for a W of 8 bits a number, int8 or float8_e4m3fn, and its scales: read as it is, widened in registers.

W [out, in] as checkpoints store it, with a float32 scale for every output channel, or for every block of W, the last
ones partial (DeepSeek-V3, arXiv:2412.19437 section 3.3.2: 128 x 128 numbers in fp8):
    y[m, n] = s[n] sum_k x[m, k] W[n, k],   or   sum_k x[m, k] W[n, k] s[n div bn, k div bk]
x [..., in] in 16 or 32 bits -> y [..., out] in x's dtype. W's numbers are exact in each of these dtypes; sums are in
float32. For few rows of x, whose time is that of reading W, and for many, where W's memory is what is saved.

The kernel gives a program a tile of rows and outputs and walks `in` along the scales' blocks; a scale multiplies a sum.
Where tiles are too few to occupy a GPU, several programs share one's `in`, and their sums are added.

XLA's form walks W's rows in chunks: XLA has the operands of a product in memory, so that of `W.astype(...) @` all of W
would be there once more, two or four times as large. A chunk that stays in cache is also faster: on 2 cores, W 4096 x
2048 and one row, 3 ms and not 22. Where `in` has several scales they multiply the chunk, in float32. The gradient to x,
for adapters on frozen weights, is such a walk too, in float32; W and its scales have none.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from .dispatch import Impl, dot, kernel_options, resolve
from .tiles import Ref, count, load, power_of_two, store

CHUNK_SIZE = 1 << 18  # numbers of W that XLA's form has widened at a time
FP8_BIAS = 1 << (15 - 7)  # between the exponents of float16 and of float8_e4m3fn
DTYPES = (jnp.int8, jnp.float8_e4m3fn)
Block = tuple[int, int]  # outputs and inputs that share a scale


def int8_matmul_reference(x: jax.Array, w: jax.Array, scale: jax.Array, *, block: Block = (128, 128)) -> jax.Array:
    if scale.ndim == 1:
        scale, block = scale[:, None], (1, w.shape[1])
    each = scale.repeat(block[0], axis=0)[: w.shape[0]].repeat(block[1], axis=1)[:, : w.shape[1]]
    return jnp.einsum("...k,nk->...n", x.astype(jnp.float32), w.astype(jnp.float32) * each).astype(x.dtype)


class _Chunks(NamedTuple):
    """Of W's rows, `size` at a time; where they do not divide W, the last begins early, with rows that were there."""

    w: jax.Array
    scale: jax.Array  # [blocks of out, blocks of in]
    block: Block
    size: int

    @classmethod
    def of(cls, w: jax.Array, scale: jax.Array, block: Block) -> "_Chunks":
        return cls(w, scale, block, min(max(CHUNK_SIZE // w.shape[1], 1), len(w)))

    def walk(self, step: Callable[[jax.Array, jax.Array], jax.Array], start: jax.Array) -> jax.Array:
        """step: (chunk's number, state) -> state"""
        return jax.lax.fori_loop(0, pl.cdiv(len(self.w), self.size), step, start)

    def first(self, chunk: jax.Array) -> jax.Array:
        return jnp.minimum(chunk * self.size, len(self.w) - self.size)

    def repeated(self, chunk: jax.Array) -> jax.Array:
        """[size] which rows were there before"""
        return self.first(chunk) + jnp.arange(self.size) < chunk * self.size

    def numbers(self, chunk: jax.Array) -> jax.Array:
        """[size, in] as W has them"""
        return jax.lax.dynamic_slice_in_dim(self.w, self.first(chunk), self.size)

    def scales(self, chunk: jax.Array) -> jax.Array:
        """[size, in], or [size, 1] where they are all of `in`"""
        some = self.scale[(self.first(chunk) + jnp.arange(self.size)) // self.block[0]]
        return some if some.shape[1] == 1 else some.repeat(self.block[1], axis=1)[:, : self.w.shape[1]]


def _product(x: jax.Array, w: jax.Array, axis: int) -> jax.Array:
    """x [m, k] with the axis of W that is k -> f32"""
    return jax.lax.dot_general(x, w, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def _xla(x: jax.Array, w: jax.Array, scale: jax.Array, block: Block) -> jax.Array:
    chunks = _Chunks.of(w, scale, block)

    def one(chunk: jax.Array) -> jax.Array:
        numbers, scales = chunks.numbers(chunk), chunks.scales(chunk)
        if scales.shape[1] == 1:
            return _product(x, numbers.astype(x.dtype), 1) * scales[:, 0]
        return _product(x.astype(jnp.float32), numbers.astype(jnp.float32) * scales, 1)

    def step(chunk: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(y, one(chunk).astype(y.dtype), chunks.first(chunk), axis=1)

    return chunks.walk(step, jnp.zeros((len(x), len(w)), x.dtype))


def _gradient(dy: jax.Array, w: jax.Array, scale: jax.Array, block: Block) -> jax.Array:
    """dy [m, out] -> the gradient of x [m, in]: dx = dy (s W)."""
    chunks = _Chunks.of(w, scale, block)

    def step(chunk: jax.Array, dx: jax.Array) -> jax.Array:
        some = jax.lax.dynamic_slice_in_dim(dy, chunks.first(chunk), chunks.size, axis=1).astype(jnp.float32)
        some = jnp.where(chunks.repeated(chunk), 0, some)
        return dx + _product(some, chunks.numbers(chunk).astype(jnp.float32) * chunks.scales(chunk), 0)

    return chunks.walk(step, jnp.zeros((len(dy), w.shape[1]), jnp.float32)).astype(dy.dtype)


class _Plan(NamedTuple):
    """How the kernel cuts its work up: the sizes of its tiles, and how many programs share one's `in`."""

    rows: int
    outs: int
    ins: int
    splits: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, rows: int, outs: int, ins: int, block_ins: int) -> "_Plan":
        """Splits that fill a GPU of some 130 processors twice, none of them of less than 4 steps."""
        few = rows <= 16
        tile_rows, tile_outs = min(power_of_two(rows), 64), 64 if few else 128
        tile_ins = min(power_of_two(block_ins), 128 if few else 64)
        tiles = pl.cdiv(rows, tile_rows) * pl.cdiv(outs, tile_outs)
        steps = pl.cdiv(ins, block_ins) * pl.cdiv(block_ins, tile_ins)
        splits = max(min(pl.cdiv(264, tiles), steps // 4), 1)
        return cls(tile_rows, tile_outs, tile_ins, splits, num_warps=4, num_stages=4 if few else 3)


def _widened(numbers: jax.Array, dtype: DTypeLike, fp8: bool) -> jax.Array:
    """int8 as it is, or what float8_e4m3fn means by these bits, over FP8_BIAS. GPUs before sm_89 do not know it, but
    its exponent and fraction in the places of float16's are a float16, subnormals too."""
    if not fp8:
        return numbers.astype(dtype)
    bits = jax.lax.shift_left(numbers.astype(jnp.int16), jnp.int16(7)) & jnp.int16(~0x4000)  # the sign is there twice
    return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(dtype)


def _kernel(x_ref: Ref, w_ref: Ref, scale_ref: Ref, y_ref: Ref, *, plan: _Plan, block: Block, fp8: bool) -> None:
    """x_ref [m, in], w_ref [out, in], scale_ref [blocks of out, blocks of in], y_ref [splits, m, out]."""
    (num_outs, num_ins), split = w_ref.shape, pl.program_id(2)
    rows, outs = (count(size, pl.program_id(axis) * size) for axis, size in ((1, plan.rows), (0, plan.outs)))
    real_rows, real_outs = rows < x_ref.shape[0], outs < num_outs
    block_steps = pl.cdiv(block[1], plan.ins)
    uneven = block[1] % plan.ins > 0 or num_ins % plan.ins > 0

    def scales(block_in: jax.Array | int) -> jax.Array:
        return load(scale_ref, jax.lax.div(outs, jnp.int32(block[0])), block_in, mask=real_outs)

    def step(index: jax.Array, sums: jax.Array) -> jax.Array:
        block_in, inner = jax.lax.div(index, jnp.int32(block_steps)), jax.lax.rem(index, jnp.int32(block_steps))
        ins = count(plan.ins, block_in * block[1] + inner * plan.ins)
        real_ins = ins < jnp.minimum(block_in * block[1] + block[1], num_ins)

        def tile(ref: Ref, index: jax.Array, real: jax.Array) -> jax.Array:
            mask = real[:, None] & real_ins if uneven else real[:, None]
            return load(ref, index[:, None], ins[None], mask=mask)

        numbers = _widened(tile(w_ref, outs, real_outs), x_ref.dtype, fp8)
        some = dot(tile(x_ref, rows, real_rows), numbers, transposed=True)
        return sums + (some if scale_ref.shape[1] == 1 else some * scales(block_in))

    steps = scale_ref.shape[1] * block_steps
    share = pl.cdiv(steps, plan.splits)
    first = split * share
    nothing = jnp.zeros((plan.rows, plan.outs), jnp.float32)
    sums = jax.lax.fori_loop(first, jnp.minimum(first + share, steps), step, nothing)
    y = sums * scales(0) if scale_ref.shape[1] == 1 else sums
    store(y_ref, split, rows[:, None], outs[None], value=y, mask=real_rows[:, None] & real_outs)


def _pallas(x: jax.Array, w: jax.Array, scale: jax.Array, block: Block, impl: Impl) -> jax.Array:
    m, (out, ins) = len(x), w.shape
    plan = _Plan.of(m, out, ins, block[1])
    fp8 = w.dtype != jnp.int8
    if fp8:
        w, scale = jax.lax.bitcast_convert_type(w, jnp.int8), scale * FP8_BIAS
    y = pl.pallas_call(
        partial(_kernel, plan=plan, block=block, fp8=fp8),
        grid=(pl.cdiv(out, plan.outs), pl.cdiv(m, plan.rows), plan.splits),
        out_shape=jax.ShapeDtypeStruct((plan.splits, m, out), x.dtype if plan.splits == 1 else jnp.float32),
        name="int8_matmul",
        **kernel_options(impl, num_warps=plan.num_warps, num_stages=plan.num_stages),
    )(x, w, scale)
    return y[0] if plan.splits == 1 else y.sum(0).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _matmul(x: jax.Array, w: jax.Array, scale: jax.Array, block: Block, impl: Impl) -> jax.Array:
    return _xla(x, w, scale, block) if impl == "xla" else _pallas(x, w, scale, block, impl)


def _forward(
    x: jax.Array, w: jax.Array, scale: jax.Array, block: Block, impl: Impl
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _matmul(x, w, scale, block, impl), (w, scale)


def _backward(
    block: Block, impl: Impl, frozen: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, None, None]:
    return _gradient(dy, *frozen, block), None, None


_matmul.defvjp(_forward, _backward)


def int8_matmul(
    x: jax.Array, w: jax.Array, scale: jax.Array, *, block: Block = (128, 128), impl: str = "auto"
) -> jax.Array:
    """x [..., in] f32, bf16 or f16, W [out, in] int8 or float8_e4m3fn -> [..., out] in x's dtype. scale f32: [out], or
    [ceil(out / block[0]), ceil(in / block[1])]. Differentiable in x alone. ValueError: a W, shapes or a block that are
    none of these; `impl`, see `dispatch.resolve`. W is finite: the kernel reads the NaN of float8 as 480."""
    form = resolve(impl)
    _check(x, w, scale, block)
    if scale.ndim == 1:
        scale, block = scale[:, None], (1, w.shape[1])
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return _matmul(rows, w, scale, block, form).reshape(*x.shape[:-1], len(w))


def _check(x: jax.Array, w: jax.Array, scale: jax.Array, block: Block) -> None:
    if w.dtype not in DTYPES:
        raise ValueError(f"W is {w.dtype}; it must be int8 or float8_e4m3fn")
    if w.ndim != 2 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"x is {x.shape} and W {w.shape}; they must be [..., in] and [out, in]")
    if min(block) < 1:
        raise ValueError(f"block is {block}; its sizes must be at least 1")
    blocks = pl.cdiv(w.shape[0], block[0]), pl.cdiv(w.shape[1], block[1])
    if scale.shape not in ((len(w),), blocks):
        raise ValueError(f"scale is {scale.shape}; it must be {(len(w),)}, or {blocks} for blocks of {block}")

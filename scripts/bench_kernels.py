"""What the kernels of kernels_pallas/ take beside the best library op: python -m scripts.bench_kernels [--op NAME]

A case runs an op and a library's way to the same numbers in turns, in one process, and prints the op's median time, its
FLOP/s and bytes/s as shares of what this device does in a plain product and in a plain copy (measured in the same run),
and the ratio: the library's time over the op's. Work is counted as the least there is: pairs that attention may see, a
weight or a cached key read once. On a GPU the kernels run, in bfloat16; on a CPU XLA's forms, in float32. No floor.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kernels_pallas.dispatch import device_kind
from kernels_pallas.grouped_matmul import grouped_mlp
from kernels_pallas.int8_matmul import int8_matmul
from kernels_pallas.mla_decode import mla_decode, mla_decode_reference
from kernels_pallas.sliding_window import paged_sliding_window, paged_sliding_window_reference, sliding_window
from kernels_pallas.softmax import softmax
from scripts.report import finish, parser

PAGE = 64
Arrays = tuple[jax.Array, ...]


class Case(NamedTuple):
    name: str
    run: Callable[..., Any]
    library: str
    instead: Callable[..., Any]
    args: Arrays
    flops: float
    size_bytes: float


class Sizes(NamedTuple):
    """Of what this device is asked to do."""

    dtype: DTypeLike
    tokens: int  # of a prompt
    rows: int  # of a decode step
    keys: int  # cached, of each row
    width: int  # of a product

    @classmethod
    def here(cls) -> "Sizes":
        if device_kind() == "cpu":
            return cls(jnp.float32, 2048, 8, 2048, 2048)
        return cls(jnp.bfloat16, 8192, 64, 8192, 8192)


def normal(seed: int, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def prompts(sizes: Sizes) -> Iterator[Case]:
    """One prompt over itself: 8 heads that share 2 groups of keys, 128 wide."""
    t, heads, groups, width = sizes.tokens, 8, 2, 128
    q, k, v = (normal(i, (1, t, n, width), sizes.dtype) for i, n in enumerate((heads, groups, groups)))
    start, length = jnp.zeros((1,), jnp.int32), jnp.full((1,), t, jnp.int32)
    for window in (None, 512):
        pairs = t * (t + 1) / 2 if window is None else t * window - window * (window - 1) / 2
        local = None if window is None else (window - 1, 0)

        def library(q: Any, k: Any, v: Any, *_: Any, local: Any = local) -> jax.Array:
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=local)

        run = partial(sliding_window, window=window, scale=width**-0.5)
        size = (2 * q.size + k.size + v.size) * q.dtype.itemsize
        name = f"sliding_window, prompt of {t}, {'all keys' if window is None else f'window {window}'}"
        args = (q, k, v, start, length)
        yield Case(name, run, "jax.nn.dot_product_attention", library, args, 4 * width * heads * pairs, size)


def pages(sizes: Sizes, heads: int, width: int) -> Arrays:
    """A pool, a table, and the positions of one query a row, behind all cached keys."""
    count = sizes.keys // PAGE
    pool = normal(7, (sizes.rows * count + 1, heads, PAGE, width), sizes.dtype)
    table = 1 + jax.random.permutation(jax.random.key(8), sizes.rows * count).reshape(sizes.rows, count)
    return pool, table.astype(jnp.int32), jnp.full((sizes.rows,), sizes.keys - 1, jnp.int32)


def decode(sizes: Sizes) -> Iterator[Case]:
    heads, groups, width = 16, 2, 128
    pool, table, start = pages(sizes, 2 * groups, width)
    q, ones = normal(1, (sizes.rows, 1, heads, width), sizes.dtype), jnp.ones_like(start)
    run: Callable[..., Any]
    plain: Callable[..., Any]
    run, plain = (
        partial(f, window=None, scale=width**-0.5) for f in (paged_sliding_window, paged_sliding_window_reference)
    )
    name, pairs = f"sliding_window, decode of {sizes.rows} behind {sizes.keys}", sizes.rows * sizes.keys
    size = pool.size * pool.dtype.itemsize
    yield Case(name, run, "XLA", plain, (q, pool, table, start, ones), 4 * width * heads * pairs, size)

    heads, latent, rope = 16, 512, 64
    pool, table, start = pages(sizes, 1, latent + rope)
    q = normal(2, (sizes.rows, 1, heads, latent + rope), sizes.dtype)
    run, plain = (partial(f, latent=latent, scale=0.07) for f in (mla_decode, mla_decode_reference))
    flops, size = 2 * (2 * latent + rope) * heads * pairs, pool.size * pool.dtype.itemsize
    name = f"mla_decode, {sizes.rows} behind {sizes.keys}"
    yield Case(name, run, "XLA", plain, (q, pool, table, start), flops, size)


def products(sizes: Sizes) -> Iterator[Case]:
    n, dtype = sizes.width, sizes.dtype
    scale = jnp.full((n,), 0.01, jnp.float32)
    wide = normal(3, (n, n), dtype)

    def library(x: Any, w: Any, scale: Any, wide: Any) -> jax.Array:
        return x @ wide.T

    for weights in (jnp.int8, jnp.float8_e4m3fn):
        w = (normal(4, (n, n), jnp.float32) * 30).astype(weights)
        for rows in (1, 16, 256):
            x = normal(5, (rows, n), dtype)
            name = f"int8_matmul, {rows} x {n} x {n}, {jnp.dtype(weights).name}"
            yield Case(
                name,
                lambda x, w, scale, _: int8_matmul(x, w, scale),
                f"XLA, {jnp.dtype(dtype).name} weights",
                library,
                (x, w, scale, wide),
                2.0 * rows * n * n,
                w.size + 2 * x.size * x.dtype.itemsize,
            )


def experts(sizes: Sizes) -> Iterator[Case]:
    num, top_k, dim, hidden, tokens = 16, 4, 512, 384, sizes.tokens // 8
    gate, up = (normal(i, (num, hidden, dim), sizes.dtype) * 0.05 for i in (1, 2))
    down, x = normal(3, (num, dim, hidden), sizes.dtype) * 0.05, normal(4, (tokens, dim), sizes.dtype)
    chosen = jax.random.randint(jax.random.key(5), (tokens, top_k), 0, num)
    weights = jnp.full((tokens, top_k), 1 / top_k, jnp.float32)
    name, flops = f"grouped_matmul, {tokens} tokens, {top_k} of {num} experts", 6.0 * tokens * top_k * dim * hidden
    size = 3 * gate.size * gate.dtype.itemsize
    args = (x, chosen, weights, gate, up, down)
    yield Case(name, grouped_mlp, "jax.lax.ragged_dot", partial(grouped_mlp, impl="ragged"), args, flops, size)


def rows(sizes: Sizes) -> Iterator[Case]:
    x = normal(6, (sizes.rows * 8, 32_000), sizes.dtype)
    name, size = f"softmax, {x.shape[0]} x {x.shape[1]}", 2.0 * x.size * x.dtype.itemsize
    yield Case(name, softmax, "jax.nn.softmax", partial(jax.nn.softmax, axis=-1), (x,), 5.0 * x.size, size)


def seconds(run: Callable[..., Any], args: Arrays) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(run(*args))
    return time.perf_counter() - begin


def medians(runs: tuple[Callable[..., Any], ...], args: Arrays, turns: int) -> list[float]:
    """In turns, after one that compiles."""
    compiled = [jax.jit(run) for run in runs]
    taken = [[seconds(run, args) for run in compiled] for _ in range(turns + 1)][1:]
    return [statistics.median(times) for times in zip(*taken, strict=True)]


def ceilings(sizes: Sizes, turns: int) -> tuple[float, float]:
    """FLOP/s of a plain product, bytes/s of a plain copy."""
    n, x = sizes.width, normal(0, (sizes.width, sizes.width), sizes.dtype)
    (product,) = medians((lambda x: x @ x,), (x,), turns)
    copy = jax.jit(lambda x: x + 1, donate_argnums=0)  # into itself: new memory costs a CPU more than the copy does
    large, taken = copy(jnp.zeros((1 << 26,), jnp.float32)), []
    for _ in range(turns):
        begin = time.perf_counter()
        large = jax.block_until_ready(copy(large))
        taken.append(time.perf_counter() - begin)
    return 2.0 * n**3 / product, 2.0 * large.nbytes / statistics.median(taken)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--op", default="", metavar="NAME", help="only cases whose name has this in it")
    options.add_argument("--turns", type=int, default=5, help="runs of each side (default 5)")
    args = options.parse_args()
    sizes, table = Sizes.here(), []
    most_flops, most_bytes = ceilings(sizes, args.turns)
    for make in (prompts, decode, products, experts, rows):
        for case in make(sizes):
            if args.op not in case.name:
                continue
            own, other = medians((case.run, case.instead), case.args, args.turns)
            table.append(
                {
                    "case": case.name,
                    "ms": own * 1e3,
                    "of_product_flops": case.flops / own / most_flops,
                    "of_copy_bytes": case.size_bytes / own / most_bytes,
                    "beside": case.library,
                    "ratio": other / own,
                }
            )
    device = jax.devices()[0].device_kind
    figure = f"{device}: {most_flops / 1e9:.0f} GFLOP/s in a product, {most_bytes / 1e9:.0f} GB/s in a copy"
    return finish(table, figure, ok=bool(table), as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())

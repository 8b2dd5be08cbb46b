"""Which kernels `scripts.aot_kernels` compiles: an op's public function and what it is given, as a checkpoint has it.

Shapes of real models, of few layers and rows: a kernel's code depends on widths and blocks, hardly on how often it
runs. One function an op; a new op adds its own to CASES. Ops that need a newer JAX are imported where they run.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kernels_pallas.band import Band
from kernels_pallas.int8_matmul import int8_matmul
from kernels_pallas.mla_decode import mla_decode
from kernels_pallas.sliding_window import paged_sliding_window, sliding_window
from kernels_pallas.softmax import softmax

TARGETS = ("sm_90a", "sm_80")
BF16, F32, INT8, FP8, INT32 = jnp.bfloat16, jnp.float32, jnp.int8, jnp.float8_e4m3fn, jnp.int32
of = jax.ShapeDtypeStruct


class Case(NamedTuple):
    name: str  # op/what is particular: a directory
    run: Callable[..., Any]
    args: tuple[jax.ShapeDtypeStruct, ...]
    targets: tuple[str, ...] = TARGETS


def _rows(*count: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(of((x,), INT32) for x in count)


def _sliding_window() -> Iterator[Case]:
    def case(name: str, heads: int, groups: int, widths: tuple[int, int], dtype: DTypeLike, run: Any) -> Case:
        q, k, v = (
            of((2, 1024, n, w), dtype) for n, w in ((heads, widths[0]), (groups, widths[0]), (groups, widths[1]))
        )
        return Case(f"sliding_window/{name}", run, (q, k, v, *_rows(2, 2)))

    def run(*args: Any, **options: Any) -> jax.Array:
        return sliding_window(*args, scale=0.1, impl="pallas", **options)

    def gradients(*args: Any, **options: Any) -> Any:
        return jax.grad(lambda *qkv: run(*qkv, *args[3:], **options).astype(F32).sum(), (0, 1, 2))(*args[:3])

    yield case("bf16-128", 8, 2, (128, 128), BF16, partial(run, window=512))
    yield case("f32-64", 4, 4, (64, 64), F32, partial(run, window=100))
    yield case("bf16-192-128-all", 4, 4, (192, 128), BF16, partial(run, window=None))
    yield case("gradient-bf16-128", 8, 2, (128, 128), BF16, partial(gradients, window=512))
    yield case("gradient-bf16-192-128", 4, 4, (192, 128), BF16, partial(gradients, window=None))
    yield case("gradient-f32-64", 4, 4, (64, 64), F32, partial(gradients, window=100))
    for tokens in (1, 128):
        paged = partial(paged_sliding_window, window=512, sinks=4, scale=0.1, impl="pallas")
        q, pool, table = of((4, tokens, 8, 128), BF16), of((64, 4, 64, 128), BF16), of((4, 16), INT32)
        yield Case(f"sliding_window/paged-{tokens}", paged, (q, pool, table, *_rows(4, 4)))


def _mla_decode() -> Iterator[Case]:
    def case(name: str, heads: int, tokens: int, dtype: DTypeLike, **options: Any) -> Case:
        q, pool, table = of((4, tokens, heads, 576), dtype), of((64, 1, 64, 576), dtype), of((4, 32), INT32)
        run = partial(mla_decode, latent=512, scale=0.1, impl="pallas", **options)
        return Case(f"mla_decode/{name}", run, (q, pool, table, *_rows(4)))

    def listed(*args: Any) -> Any:
        blocks, count = args[4:]
        return mla_decode(*args[:4], latent=512, scale=0.1, blocks=blocks, count=count, block_size=64, impl="pallas")

    yield case("bf16-16", 16, 1, BF16)
    yield case("bf16-128", 128, 1, BF16)
    yield case("bf16-128-draft", 128, 2, BF16, window=1024, sinks=4)
    yield case("f32-16", 16, 1, F32)
    first = case("bf16-128-blocks", 128, 1, BF16)
    yield first._replace(run=listed, args=(*first.args, of((4, 16), INT32), *_rows(4)))


def _softmax() -> Iterator[Case]:
    def gradient(*args: Any) -> jax.Array:
        return jax.grad(lambda x: (softmax(x, *args[1:], impl="pallas").astype(F32) ** 2).sum())(args[0])

    for name, dtype, shape in (("f32-4096", F32, (64, 4096)), ("bf16-129280", BF16, (8, 129280))):
        x, mask = of(shape, dtype), of(shape[1:], jnp.bool_)
        yield Case(f"softmax/{name}", partial(softmax, impl="pallas"), (x,))
        yield Case(f"softmax/{name}-mask", partial(softmax, impl="pallas"), (x, mask))
        yield Case(f"softmax/gradient-{name}-mask", gradient, (x, mask))


def _int8_matmul() -> Iterator[Case]:
    for name, w, scale in (("int8", INT8, (2048,)), ("fp8-blocks", FP8, (16, 32))):
        for rows in (1, 256):
            args = of((rows, 4096), BF16), of((2048, 4096), w), of(scale, F32)
            yield Case(f"int8_matmul/{name}-{rows}", partial(int8_matmul, impl="pallas"), args)


def _hopper_sliding_window() -> Iterator[Case]:
    """The private route of sm_90a, which the public function does not take here: there is no GPU to choose it for."""
    for name, heads, groups, width, v_width, window in (
        ("bf16-64", 4, 4, 64, 64, 100),
        ("bf16-128", 8, 2, 128, 128, 512),
        ("bf16-192-128-all", 4, 4, 192, 128, None),
        ("bf16-256", 4, 1, 256, 256, 512),
    ):

        def run(*args: Any, window: int | None = window) -> Any:
            from kernels_pallas.hopper_sliding_window import forward

            return forward(*args, band=Band(window, 0), scale=0.1)

        q, k, v = (of((2, 1000, n, w), BF16) for n, w in ((heads, width), (groups, width), (groups, v_width)))
        yield Case(f"hopper_sliding_window/{name}", run, (q, k, v, of((heads,), F32), *_rows(2, 2)), ("sm_90a",))


def _hopper_mla_decode() -> Iterator[Case]:
    """The private route of sm_90a."""
    for name, heads, tokens, latent, page_size, window in (
        ("bf16-16", 16, 1, 512, 64, None),
        ("bf16-128-page16", 128, 1, 512, 16, None),
        ("bf16-128-draft", 128, 2, 512, 64, 1024),
        ("bf16-256", 16, 1, 256, 64, None),
    ):

        def run(*args: Any, latent: int = latent, window: int | None = window) -> Any:
            from kernels_pallas.hopper_mla_decode import pieces

            return pieces(*args, latent=latent, band=Band(window, 0), scale=0.1, splits=4)

        q, pool = (of(shape, BF16) for shape in ((4, tokens, heads, latent + 64), (64, 1, page_size, latent + 64)))
        args = q, pool, of((4, 2048 // page_size), INT32), *_rows(4, 4)
        yield Case(f"hopper_mla_decode/{name}", run, args, ("sm_90a",))


CASES = (
    *_sliding_window(),
    *_softmax(),
    *_mla_decode(),
    *_int8_matmul(),
    *_hopper_sliding_window(),
    *_hopper_mla_decode(),
)

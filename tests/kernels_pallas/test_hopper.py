"""The forms for Hopper in JAX's interpreter of its threads, copies and barriers: values against float64, and races.

It stands in for no GPU: it knows neither layouts nor descriptors nor fences. That the kernels compile, make aot shows.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.band import Band
from kernels_pallas.online_softmax import NONE, base2

from .compare import assert_close

if jax.__version_info__ < (0, 11):
    pytest.skip("the interpreter of Mosaic GPU kernels came with jax 0.11", allow_module_level=True)

from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter  # its races are nowhere public
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import hopper_mla_decode, hopper_sliding_window

SCALE = 0.1
ROUNDED = {"absolute": 0.01, "relative": 0.02, "cosine": 1e-4}
LSE = {"absolute": 1e-3, "relative": 1e-4}
WIDTH, LATENT = 192, 128


@pytest.fixture(autouse=True)
def watched_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes no notice of what wgmma reads, and so of no race with it: here that is read once more, and
    committed, as wgmma and the copies into the same memory need no fence between them."""
    wgmma = plgpu.wgmma

    def watched(sums: Any, a: Any, b: Any) -> None:
        a[...], b[...]
        plgpu.commit_smem()
        wgmma(sums, a, b)

    monkeypatch.setattr(plgpu, "wgmma", watched)


@partial(jax.jit, static_argnames=("window", "sinks"))
def attend(*args: Any, window: int | None, sinks: int) -> Any:
    options = {"band": Band(window, sinks), "interpret": plgpu.InterpretGPUParams(detect_races=True)}
    return hopper_sliding_window.forward(*args, scale=SCALE, **options)


@partial(jax.jit, static_argnames=("window", "sinks", "splits"))
def decode(*args: Any, window: int | None = None, sinks: int = 0, splits: int = 1) -> Any:
    options = {"band": Band(window, sinks), "interpret": plgpu.InterpretGPUParams(detect_races=True)}
    return hopper_mla_decode.pieces(*args, latent=LATENT, scale=SCALE, splits=splits, **options)


def races(run: Any) -> bool:
    """Whether it does, run to its end. jax 0.12 raises then, 0.11 makes a note of it."""
    try:
        jax.block_until_ready(run())
        return bool(interpreter.get_races().races_found)
    except Exception as error:
        if "RACE DETECTED" not in str(error):
            raise
        return True
    finally:
        interpreter.reset_gpu_interpret_mode_state()


def without_races(run: Any) -> tuple[jax.Array, ...]:
    results = []
    assert not races(lambda: results.append(jax.block_until_ready(run())))
    return results[0]


def random(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def exact(*arrays: jax.Array) -> list[np.ndarray]:
    return [np.asarray(x).astype(np.float64) for x in arrays]


def sees(query: int, window: int | None, sinks: int, end: int) -> np.ndarray:
    """The positions of the keys that a query sees."""
    keys = np.arange(max(min(query + 1, end), 0))
    return keys if window is None else keys[(query - keys < window) | (keys < sinks)]


def softmax(scores: np.ndarray, values: np.ndarray, sink: float = -np.inf) -> tuple[np.ndarray, float]:
    """scores [s] and sink, natural -> the mean of values [s, v], and lse to base 2, NONE for none"""
    if not len(scores) and sink == -np.inf:
        return np.zeros(values.shape[1]), NONE
    every = np.append(scores, sink)
    p = np.exp(every - every.max())
    return p[:-1] @ values / p.sum(), (every.max() + np.log(p.sum())) * np.log2(np.e)


class Row:
    """Two rows with two heads, which share a group: what no query of a row sees is NaN."""

    def __init__(self, queries: int, keys: int, width: int, v_width: int, dtype: Any = jnp.bfloat16) -> None:
        self.q = random(0, 2, queries, 2, width, dtype=dtype)
        self.k, self.v = random(1, 2, keys, 1, width, dtype=dtype), random(2, 2, keys, 1, v_width, dtype=dtype)

    def check(
        self,
        start: list[int],
        length: list[int],
        *,
        window: int | None = None,
        sinks: int = 0,
        sink_logits: tuple[float, float] = (-np.inf, -np.inf),
    ) -> None:
        out, lse, seen = self.want(start, length, window, sinks, sink_logits)
        k, v = (jnp.where(seen[:, :, None, None], x, jnp.nan) for x in (self.k, self.v))
        args = self.q, k, v, base2(jnp.array(sink_logits)), jnp.array(start), jnp.array(length)
        got = without_races(lambda: attend(*args, window=window, sinks=sinks))
        assert got[0].dtype == self.q.dtype
        assert_close(got[0], out, **ROUNDED)
        assert_close(got[1], lse, **LSE)

    def want(self, start: Any, length: Any, window: int | None, sinks: int, sink_logits: Any) -> Any:
        q, k, v = exact(self.q, self.k, self.v)
        out, lse, seen = np.zeros((*q.shape[:3], v.shape[3])), np.zeros(q.shape[:3]), np.zeros(k.shape[:2], bool)
        for row, i, head in np.ndindex(q.shape[:3]):
            keys = sees(start[row] + i, window, sinks, length[row])
            seen[row, keys] = True
            scores = k[row, keys, 0] @ q[row, i, head] * SCALE
            out[row, i, head], lse[row, i, head] = softmax(scores, v[row, keys, 0], sink_logits[head])
        return out, lse, seen


class Pages:
    """A paged cache: what no query sees is NaN, and a page with nothing that one sees is not in the pool."""

    def __init__(self, rows: int, tokens: int, heads: int, page_size: int) -> None:
        places = 256 // page_size
        self.q = random(0, rows, tokens, heads, WIDTH)
        self.pool = random(1, rows * places, 1, page_size, WIDTH)
        self.table = np.random.default_rng(2).permutation(rows * places).reshape(rows, places).astype(np.int32)

    def check(self, length: list[int], *, window: int | None = None, sinks: int = 0, splits: int = 1) -> None:
        out, lse, seen = self.want(length, window, sinks)
        args = self.args(length, seen)
        outs, lses = exact(*without_races(lambda: decode(*args, window=window, sinks=sinks, splits=splits)))
        shares = np.exp2(lses - lses.max(0))
        assert_close((outs * shares[..., None]).sum(0) / shares.sum(0)[..., None], out, **ROUNDED)
        assert_close(lses.max(0) + np.log2(shares.sum(0)), lse, **LSE)

    def args(self, length: list[int], seen: np.ndarray) -> Any:
        """seen [pages, page_size]"""
        pool = jnp.where(seen[:, None, :, None], self.pool, jnp.nan)
        table = np.where(seen.any(1)[self.table], self.table, 1 << 20)
        start = jnp.array(length) - self.q.shape[1]
        return self.q, pool, jnp.asarray(table, jnp.int32), start, jnp.array(length)

    def want(self, length: list[int], window: int | None, sinks: int) -> Any:
        q, pool = exact(self.q, self.pool)
        out, lse, seen = np.zeros((*q.shape[:3], LATENT)), np.zeros(q.shape[:3]), np.zeros(pool.shape[::2], bool)
        for row, i, head in np.ndindex(q.shape[:3]):
            keys = sees(length[row] - q.shape[1] + i, window, sinks, length[row])
            at = self.table[row, keys // pool.shape[2]], keys % pool.shape[2]
            seen[at] = True
            held = pool[at[0], 0, at[1]]
            out[row, i, head], lse[row, i, head] = softmax(held @ q[row, i, head] * SCALE, held[:, :LATENT])
        return out, lse, seen


def test_a_row_is_seen_up_to_each_query_and_to_its_length() -> None:
    row = Row(70, 150, 64, 64)  # neither is a multiple of what copies go by
    row.check([80, 7], [150, 37])
    row.check([0, 20], [0, 1])  # no keys at all, then a single one


def test_a_window_with_sinks_skips_what_lies_between() -> None:
    row = Row(70, 200, 192, 128)
    row.check([130, 3], [200, 150], window=50, sinks=3)
    row.check([100, 130], [20, 100], window=50, sinks=3, sink_logits=(0.5, -2.0))  # past all keys but the sinks


def test_a_window_alone_leaves_queries_behind_it_without_keys() -> None:
    Row(70, 200, 64, 128, jnp.float16).check([100, 130], [60, 100], window=50)


def test_decode_reads_pages_in_their_order() -> None:
    pages = Pages(rows=2, tokens=1, heads=70, page_size=16)  # two tiles of queries, the second nearly empty
    pages.check([150, 0], splits=2)


def test_decode_of_a_draft_through_a_window_reads_its_own_pages_only() -> None:
    pages = Pages(rows=2, tokens=3, heads=16, page_size=32)
    pages.check([200, 80], window=50, sinks=3)


def test_decode_takes_pages_longer_than_a_tile() -> None:
    Pages(rows=2, tokens=1, heads=2, page_size=128).check([200, 129], window=100, splits=3)


@pytest.mark.parametrize(("barrier", "waiting"), [("weighed", 0), ("weighed", 1)])
def test_a_warpgroup_that_does_not_wait_at_a_barrier_races(
    monkeypatch: pytest.MonkeyPatch, barrier: str, waiting: int
) -> None:
    pages = Pages(rows=1, tokens=1, heads=2, page_size=64)
    args, shared, wait = pages.args([100], pages.want([100], None, 0)[2]), hopper_mla_decode._Shared, plgpu.barrier_wait
    barriers = []

    def spy(*refs: Any) -> Any:
        barriers.append(getattr(shared(*refs), barrier))
        return shared(*refs)

    def one_waits(ref: Any) -> None:
        everybody = not any(ref is x for x in barriers)
        pl.when(everybody | (jax.lax.axis_index("group") == waiting))(lambda: wait(ref))

    spy.types = shared.types
    monkeypatch.setattr(hopper_mla_decode, "_Shared", spy)
    monkeypatch.setattr(plgpu, "barrier_wait", one_waits)
    assert races(lambda: decode.__wrapped__(*args))


def test_shapes_that_wgmma_and_copies_cannot_take_do_not_fit() -> None:
    def row(width: int, v_width: int, dtype: Any = jnp.bfloat16) -> bool:
        q, k, v = (jax.ShapeDtypeStruct((1, 64, 2, n), dtype) for n in (width, width, v_width))
        return hopper_sliding_window.fits(q, k, v)

    def pages(page_size: int, width: int, latent: int, dtype: Any = jnp.bfloat16) -> bool:
        q, pool = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((1, 1, 2, width), (4, 1, page_size, width)))
        return hopper_mla_decode.fits(q, pool, latent)

    assert all(row(*widths) for widths in ((64, 64), (128, 128), (192, 128), (256, 256), (128, 256)))
    assert not any(row(*widths) for widths in ((96, 64), (64, 80), (320, 64), (64, 320)))
    assert row(64, 64, jnp.float16)
    assert not row(64, 64, jnp.float32)
    assert all(pages(size, 576, 512) for size in (8, 16, 32, 64, 128))
    assert not any(pages(size, 576, 512) for size in (1, 4, 48, 96))
    assert not any(pages(16, *widths) for widths in ((640, 512), (544, 512), (128, 64)))
    assert not pages(16, 576, 512, jnp.float32)

"""The device side of the border: JAX programs compiled ahead of time, one a bucket, and the state they pass on.

The only module of the engine that knows JAX arrays, with `programs` and `tables`. What stays on the device (KV pools,
last tokens and logit tables of the slots) is donated to a step and rebound to what it returns in one assignment.
Everything that can run is compiled in `warmup`: a shape that was not raises, and nothing outside these programs
computes, so no request can cause a compile.
"""

import gc
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from model.sharding import replicated
from model.steps import DeviceState, StepOutputs
from model.transformer import Transformer
from serving.batch import PAGES_AT_ONCE, Batch, Bucket, Kind, Progress, StepOutput, StepTimes
from serving.config import EngineConfig

from .buckets import derive
from .compiles import CompileCounter
from .footprint import Footprint
from .memory import free_bytes, is_tight, num_pages
from .page_copies import PageCopies, PagesOut
from .programs import Program, Programs
from .ring import Ring
from .step import padding
from .tables import TableWriter
from .wire import pack, unpack_outputs

_TURNS = 3  # of the steps in the warm-up: the first also gets memory
_USUAL_TOKENS = 256  # before a row's next one, when it generates
_FAR_TOKENS = 4096  # before a step's own, for the time that attention over them takes


def use_compilation_cache(directory: Path) -> None:
    """Keep compiled programs of this process in `directory`, however small: the second start is fast.

    By the number of cores: XLA cuts a CPU program into pieces for the cores that it sees and JAX's key leaves them out,
    so a program that was compiled on two cores is found on one, where it takes a third longer.
    """
    directory = directory / f"{_num_cores()}-cores"
    directory.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _num_cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class JaxRunner:
    """Implements serving.batch.Runner for a Transformer. `mesh`: the one that its parameters are on."""

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        *,
        max_context: int,
        mesh: Mesh | None = None,
        compile_threads: int = 2,
        buckets: Sequence[Bucket] | None = None,
        ring: Ring | None = None,
    ) -> None:
        self._mesh, self._compile_threads, self._page_size = mesh, compile_threads, config.page_size
        self._buckets = tuple(buckets or derive(config, max_context))
        self._made = Programs(model, config, mesh)
        self._vocab_size, self._max_slots = model.config.vocab_size, config.max_slots
        free = free_bytes(next(iter(self._made.leaves[0].devices()))) - self._made.table_bytes
        whole = -(-max_context // config.page_size)
        self._pages_per_row = whole if ring is None else min(whole, ring.size)
        if is_tight(config.num_pages, self._pages_per_row * config.max_slots * self._made.page_bytes, free):
            free -= self._peak_bytes(self._pages_per_row + 1)
        self._num_pages = num_pages(
            asked=config.num_pages,
            pages_per_row=self._pages_per_row,
            max_slots=config.max_slots,
            page_bytes=self._made.page_bytes,
            free=free,
        )
        self._programs: dict[Bucket, Program] = {}
        self._fresh: Callable[[], DeviceState] | None = None
        self._state: DeviceState | None = None
        self._tables: TableWriter | None = None
        self._copies: PageCopies | None = None
        self._page_copy_s = 0.0
        self._step_s: dict[Bucket, StepTimes] = {}
        self._compiles = CompileCounter()

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self._buckets

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def page_bytes(self) -> int:
        return self._made.page_bytes

    @property
    def page_copy_s(self) -> float:
        return self._page_copy_s

    @property
    def step_s(self) -> dict[Bucket, StepTimes]:
        return self._step_s

    @property
    def num_compiles(self) -> int:
        """Programs built in this process since the runner exists."""
        return self._compiles.count

    def warmup(self, progress: Progress) -> None:
        """Compile every bucket, a few at a time, the largest first; then run them on padding.

        What `progress` raises ends it, and so does a program that compiles and cannot run.
        """
        progress(0, len(self._buckets))
        self._fresh = self._made.fresh_state(self._num_pages)
        self.reset()
        assert self._state is not None
        sharding = None if self._mesh is None else replicated(self._mesh)
        self._copies = PageCopies(self._state.pools, sharding)
        if self._state.tables is not None:
            self._tables = TableWriter(self._vocab_size, self._state.tables, sharding)
        order = sorted(self._buckets, key=lambda b: b.rows * b.tokens * (1 + b.pages), reverse=True)
        with ThreadPoolExecutor(self._compile_threads, thread_name_prefix="tidegate-compile") as pool:
            futures = {pool.submit(self._made.compile, bucket, self._num_pages): bucket for bucket in order}
            try:
                for done, future in enumerate(as_completed(futures), start=1):
                    self._programs[futures[future]] = future.result()
                    progress(done, len(self._buckets))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        self._try_out(order)
        self._page_copy_s = self._measure_copy()
        # What tracing left stays for ever: each full collection would walk it all, while no request is answered.
        gc.collect()
        gc.freeze()

    def submit(self, batch: Batch) -> "JaxPending":
        """Dispatch. ValueError for a bucket that was not compiled, and for tables that this server does not keep."""
        program = self._programs.get(batch.bucket)
        if program is None:
            raise ValueError(f"{batch.bucket} was not compiled")
        if batch.set_tables or batch.set_masks:
            self._set_tables(batch)
        packed: Any = pack(batch)
        if self._mesh is not None:
            packed = jax.device_put(packed, self._made.batch_sharding(batch.bucket))
        if batch.bucket.kind is Kind.SCORE:
            small, out = program.run(self._made.leaves, packed)
        else:
            self._state, (small, out) = program.run(self._made.leaves, self._state, packed)
        return JaxPending.of(small, out, want_top=bool(batch.want_top), want_prompt=bool(batch.want_prompt))

    def _set_tables(self, batch: Batch) -> None:
        if self._tables is None or self._state is None or self._state.tables is None:
            raise ValueError("a row adjusts its logits, and engine.sampling_tables is off")
        tables = self._tables.write(self._state.tables, batch.set_tables, batch.set_masks)
        self._state = self._state._replace(tables=tables)

    def read_pages(self, pages: Sequence[int]) -> PagesOut:
        assert self._copies is not None
        assert self._state is not None
        return self._copies.read(self._state.pools, pages)

    def write_pages(self, pages: Sequence[int], content: NDArray[np.uint8]) -> None:
        assert self._copies is not None
        assert self._state is not None
        self._state = self._state._replace(pools=self._copies.write(self._state.pools, pages, content))

    def _try_out(self, largest_first: Sequence[Bucket]) -> None:
        """Run a step of each bucket, of SCORE the smallest alone: what they take tells how long a chunk may be. Prompts
        come before decode steps, which take up what the prompts sampled."""
        scores = [bucket for bucket in largest_first if bucket.kind is Kind.SCORE]
        for bucket in scores[-1:]:
            self.submit(padding(bucket)).result()
        cached = [bucket for bucket in largest_first if bucket.kind is not Kind.SCORE]
        cached.sort(key=lambda bucket: bucket.kind is not Kind.EXTEND)
        # In turns, so that a machine that slows down for a while does not make some look slower than others.
        turns = [
            {bucket: self._time(self._trial(bucket, self._usual(bucket))) for bucket in cached} for _ in range(_TURNS)
        ]
        for bucket in cached:
            alone_s = min(turn[bucket] for turn in turns)
            prefix = min(self._room(bucket), _FAR_TOKENS)
            if bucket.kind is Kind.EXTEND and bucket.rows == 1 and prefix > 0:  # what chunks of a long prompt go into
                self._step_s[bucket] = StepTimes(alone_s, self._time(self._trial(bucket, prefix)), prefix)
            else:
                self._step_s[bucket] = StepTimes(alone_s)

    def _room(self, bucket: Bucket) -> int:
        """Tokens that a row may have before those of a step."""
        return bucket.pages * self._page_size - bucket.tokens

    def _usual(self, bucket: Bucket) -> int:
        """What a row has before those of a step, as a rule."""
        return 0 if bucket.kind is Kind.EXTEND else min(self._room(bucket), _USUAL_TOKENS)

    def _time(self, batch: Batch) -> float:
        start = time.perf_counter()
        self.submit(batch).result()
        return time.perf_counter() - start

    def _trial(self, bucket: Bucket, prefix: int = 0) -> Batch:
        """A batch full of drawn tokens, which go to different experts, behind so many of whatever pages. What it leaves
        in pages and slots is written again before anybody reads it."""
        rows = np.arange(bucket.rows, dtype=np.int32)
        pages = np.arange(bucket.rows * bucket.pages, dtype=np.int32).reshape(bucket.rows, bucket.pages)
        draw = np.random.default_rng(bucket.rows * bucket.tokens)
        return replace(
            padding(bucket),
            tokens=draw.integers(0, self._vocab_size, (bucket.rows, bucket.tokens), np.int32),
            start=np.full(bucket.rows, prefix, np.int32),
            length=np.full(bucket.rows, bucket.tokens, np.int32),
            page_table=pages % self._num_pages,
            slot=1 + rows % self._max_slots,
        )

    def _measure_copy(self) -> float:
        """Seconds a page: the second of two writes to page 0, waited for by a read."""
        content = np.zeros((PAGES_AT_ONCE, self.page_bytes), np.uint8)
        start = 0.0
        for _ in range(2):
            start = time.perf_counter()
            self.write_pages([0] * PAGES_AT_ONCE, content)
            self.read_pages([0]).result()
        return (time.perf_counter() - start) / PAGES_AT_ONCE

    def reset(self) -> None:
        """A zeroed cache and empty slots; the old ones are let go first."""
        assert self._fresh is not None, "reset before warmup"
        self._state = None
        self._state = self._fresh()

    def close(self) -> None:
        self._compiles.close()
        self._state = None
        self._programs.clear()

    def footprint(self) -> Footprint:
        """What `warmup` made, for people."""
        return Footprint(
            weight_bytes=self._made.weight_bytes,
            table_bytes=self._made.table_bytes,
            page_bytes=self._made.page_bytes,
            num_pages=self._num_pages,
            pages_per_row=self._pages_per_row,
            programs=tuple(self._programs[bucket].cost for bucket in self._buckets if bucket in self._programs),
        )

    def _peak_bytes(self, num_pages: int) -> int:
        """Memory that the largest bucket of each kind needs, measured on a cache of one row."""
        largest = {b.kind: b for b in sorted(self._buckets, key=lambda b: b.rows * b.tokens * (1 + b.pages))}
        return max(self._made.compile(bucket, num_pages).cost.temp_bytes for bucket in largest.values())


@dataclass(frozen=True, slots=True)
class JaxPending:
    """Implements serving.batch.Pending. Copies to the host start at once, for what is wanted only."""

    small: jax.Array
    extras: dict[str, jax.Array]

    @classmethod
    def of(cls, small: jax.Array, out: StepOutputs, *, want_top: bool, want_prompt: bool) -> "JaxPending":
        names = ["top_ids", "top_logprobs"] if want_top else []
        names += ["prompt_logprobs", "prompt_top_ids", "prompt_top_logprobs"] if want_prompt else []
        extras = {name: getattr(out, name) for name in names}
        for array in (small, *extras.values()):
            array.copy_to_host_async()
        return cls(small, extras)

    def done(self) -> bool:
        return bool(self.small.is_ready())  # type: ignore[attr-defined]  # missing from jax.Array's declaration

    def result(self) -> StepOutput:
        fetched: dict[str, NDArray[Any] | None] = dict.fromkeys(
            ("top_ids", "top_logprobs", "prompt_logprobs", "prompt_top_ids", "prompt_top_logprobs")
        )
        fetched |= {name: np.asarray(array) for name, array in self.extras.items()}
        return StepOutput(**unpack_outputs(np.asarray(self.small)), **fetched)  # type: ignore[arg-type]

"""The device side of the border: JAX programs compiled ahead of time, one a bucket, and the state they pass on.

The only module of the engine that knows JAX arrays, with `tables`. What stays on the device (KV pools, last tokens and
logit tables of the slots) is donated to a step and rebound to what it returns in one assignment. Everything that can
run is compiled in `warmup`: a shape that was not raises, and nothing outside these programs computes, so no request
can cause a compile.
"""

import gc
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from model.adjust import neutral_tables, table_bytes
from model.cache import init_cache, page_bytes
from model.sampling import Sampling
from model.sharding import named, replicated
from model.steps import DeviceState, StepOutputs, decode_step, extend_step, score_step
from model.transformer import Transformer
from serving.batch import NUM_TOP, Batch, Bucket, Kind, Progress, StepOutput
from serving.config import EngineConfig

from .buckets import derive
from .compiles import CompileCounter
from .memory import free_bytes, num_pages
from .step import padding
from .tables import TableWriter
from .wire import pack, pack_outputs, packed_shape, unpack, unpack_outputs

Leaves = list[jax.Array]
Results = tuple[jax.Array, StepOutputs]


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
    ) -> None:
        self._config, self._model_config, self._mesh = config, model.config, mesh
        self._buckets = tuple(buckets or derive(config, max_context))
        graph, params = nnx.split(model)
        self._leaves, treedef = jax.tree.flatten(params)
        self._rebuild: Callable[[Leaves], Transformer] = lambda leaves: nnx.merge(
            graph, jax.tree.unflatten(treedef, leaves)
        )
        self._dtype = model.embed_tokens.weight().dtype
        self._compile_threads = compile_threads
        self._num_pages = num_pages(
            asked=config.num_pages,
            pages_per_row=-(-max_context // config.page_size),
            max_slots=config.max_slots,
            page_bytes=page_bytes(model.config, config.page_size, self._dtype),
            free=free_bytes(next(iter(self._leaves[0].devices()))) - self._table_bytes(),
        )
        self._programs: dict[Bucket, Callable[..., Any]] = {}
        self._fresh: Callable[[], DeviceState] | None = None
        self._state: DeviceState | None = None
        self._tables: TableWriter | None = None
        self._compiles = CompileCounter()

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self._buckets

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def num_compiles(self) -> int:
        """Programs built in this process since the runner exists."""
        return self._compiles.count

    def warmup(self, progress: Progress) -> None:
        """Compile every bucket, a few at a time, the largest first; then run the smallest of each kind on padding.

        What `progress` raises ends it, and so does a program that compiles and cannot run.
        """
        progress(0, len(self._buckets))
        self._fresh = jax.jit(self._init_state, out_shardings=self._replicated()).lower().compile()
        self.reset()
        if self._state is not None and self._state.tables is not None:
            self._tables = TableWriter(self._model_config.vocab_size, self._state.tables, self._replicated())
        order = sorted(self._buckets, key=lambda b: b.rows * b.tokens * (1 + b.pages), reverse=True)
        with ThreadPoolExecutor(self._compile_threads, thread_name_prefix="tidegate-compile") as pool:
            futures = {pool.submit(self._compile, bucket): bucket for bucket in order}
            try:
                for done, future in enumerate(as_completed(futures), start=1):
                    self._programs[futures[future]] = future.result()
                    progress(done, len(self._buckets))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        for bucket in {b.kind: b for b in order}.values():  # the last of a kind is its smallest
            self.submit(padding(bucket)).result()
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
            packed = jax.device_put(packed, self._batch_sharding(batch.bucket))
        if batch.bucket.kind is Kind.SCORE:
            small, out = program(self._leaves, packed)
        else:
            self._state, (small, out) = program(self._leaves, self._state, packed)
        return JaxPending.of(small, out, want_top=bool(batch.want_top), want_prompt=bool(batch.want_prompt))

    def _set_tables(self, batch: Batch) -> None:
        if self._tables is None or self._state is None or self._state.tables is None:
            raise ValueError("a row adjusts its logits, and engine.sampling_tables is off")
        tables = self._tables.write(self._state.tables, batch.set_tables, batch.set_masks)
        self._state = self._state._replace(tables=tables)

    def reset(self) -> None:
        """A zeroed cache and empty slots; the old ones are let go first."""
        assert self._fresh is not None, "reset before warmup"
        self._state = None
        self._state = self._fresh()

    def close(self) -> None:
        self._compiles.close()
        self._state = None
        self._programs.clear()

    # Compiling

    def _init_state(self) -> DeviceState:
        pools = init_cache(self._model_config, self._num_pages, self._config.page_size, self._dtype)
        slots, vocab = self._config.max_slots + 1, self._model_config.vocab_size
        tables = neutral_tables(slots, vocab) if self._config.sampling_tables else None
        return DeviceState(pools, jnp.zeros(slots, jnp.int32), tables)

    def _table_bytes(self) -> int:
        kept = self._config.sampling_tables
        return table_bytes(self._config.max_slots + 1, self._model_config.vocab_size) if kept else 0

    def _compile(self, bucket: Bucket) -> Callable[..., Any]:
        packed = jax.ShapeDtypeStruct(packed_shape(bucket), np.int32, sharding=self._batch_sharding(bucket))
        if bucket.kind is Kind.SCORE:
            program = jax.jit(self._score_program(bucket), out_shardings=self._replicated())
            return program.lower(self._leaves, packed).compile()
        program = jax.jit(self._cached_program(bucket), out_shardings=self._replicated(), donate_argnums=(1,))
        return program.lower(self._leaves, self._state, packed).compile()

    def _score_program(self, bucket: Bucket) -> Callable[[Leaves, jax.Array], Results]:
        def score(leaves: Leaves, packed: jax.Array) -> Results:
            batch = unpack(packed, bucket)
            # Constants: XLA drops the whole draw.
            batch = batch._replace(sampling=_greedy(bucket.rows), adjust=None)
            out = score_step(self._rebuild(leaves), batch, num_top=NUM_TOP)
            return pack_outputs(out), out

        return score

    def _cached_program(
        self, bucket: Bucket
    ) -> Callable[[Leaves, DeviceState, jax.Array], tuple[DeviceState, Results]]:
        step = extend_step if bucket.kind is Kind.EXTEND else decode_step

        def run(leaves: Leaves, state: DeviceState, packed: jax.Array) -> tuple[DeviceState, Results]:
            state, out = step(self._rebuild(leaves), state, unpack(packed, bucket), num_top=NUM_TOP)
            return state, (pack_outputs(out), out)

        return run

    def _replicated(self) -> NamedSharding | None:
        return None if self._mesh is None else replicated(self._mesh)

    def _batch_sharding(self, bucket: Bucket) -> NamedSharding | None:
        return None if self._mesh is None else named(self._mesh, ("batch", None), packed_shape(bucket))


def _greedy(rows: int) -> Sampling:
    zeros, ids = jnp.zeros(rows), jnp.zeros(rows, jnp.int32)
    return Sampling(temperature=zeros, top_k=ids, top_p=zeros, min_p=zeros, seed=jnp.zeros((rows, 2), jnp.uint32))


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

"""One compiled program a bucket: what the device runs, what it takes to compile, and how much memory it needs.

A program takes the model's parameters as leaves, the state that stays on the device (donated) and a batch as one packed
array. Compiling needs the shapes alone, so the peak of the largest buckets is known before the KV cache is made.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from model.adjust import neutral_tables, table_bytes
from model.cache import init_cache, page_bytes
from model.drafts import Drafts
from model.sampling import Sampling
from model.sharding import named, replicated
from model.speculate import speculate_step
from model.steps import DeviceState, StepOutputs, decode_step, extend_step, score_step
from model.transformer import Transformer
from serving.batch import NUM_TOP, Bucket, Kind
from serving.config import EngineConfig

from .footprint import ProgramCost
from .wire import pack_outputs, packed_shape, unpack

Leaves = list[jax.Array]
Results = tuple[jax.Array, StepOutputs]

_CACHED = {Kind.EXTEND: extend_step, Kind.DECODE: decode_step, Kind.SPECULATE: speculate_step}


@dataclass(frozen=True, slots=True)
class Program:
    run: Callable[..., Any]
    cost: ProgramCost


class Programs:
    """`mesh`: the one that the model's parameters are on. ValueError where the model cannot do what `config` wants."""

    def __init__(self, model: Transformer, config: EngineConfig, mesh: Mesh | None) -> None:
        if config.speculate and not model.config.num_mtp_layers:
            raise ValueError("engine.speculate: this model has no MTP layer to draft with (num_nextn_predict_layers)")
        self._config, self._model_config, self._mesh = config, model.config, mesh
        graph, params = nnx.split(model)
        self.leaves: Leaves
        self.leaves, treedef = jax.tree.flatten(params)
        self._rebuild: Callable[[Leaves], Transformer] = lambda leaves: nnx.merge(
            graph, jax.tree.unflatten(treedef, leaves)
        )
        self._dtype = model.embed_tokens.weight().dtype

    @property
    def page_bytes(self) -> int:
        return page_bytes(self._model_config, self._config.page_size, self._dtype, mtp=self._config.speculate)

    @property
    def weight_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def table_bytes(self) -> int:
        """Of the slots' logit tables."""
        kept = self._config.sampling_tables
        return table_bytes(self._config.max_slots + 1, self._model_config.vocab_size) if kept else 0

    def fresh_state(self, num_pages: int) -> Callable[[], DeviceState]:
        """A program that makes a zeroed cache and empty slots."""
        made: Callable[[], DeviceState] = (
            jax.jit(lambda: self._state(num_pages), out_shardings=self._replicated()).lower().compile()
        )
        return made

    def compile(self, bucket: Bucket, num_pages: int) -> Program:
        """For a cache of so many pages."""
        start = time.perf_counter()
        packed = jax.ShapeDtypeStruct(packed_shape(bucket), np.int32, sharding=self.batch_sharding(bucket))
        if bucket.kind is Kind.SCORE:
            jitted = jax.jit(self._score(bucket), out_shardings=self._replicated())
            compiled = jitted.lower(self.leaves, packed).compile()
        else:
            state = jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._replicated()),
                jax.eval_shape(lambda: self._state(num_pages)),
            )
            jitted = jax.jit(self._cached(bucket), out_shardings=self._replicated(), donate_argnums=(1,))
            compiled = jitted.lower(self.leaves, state, packed).compile()
        return Program(compiled, ProgramCost(bucket, time.perf_counter() - start, _temp_bytes(compiled)))

    def batch_sharding(self, bucket: Bucket) -> NamedSharding | None:
        return None if self._mesh is None else named(self._mesh, ("batch", None), packed_shape(bucket))

    def _state(self, num_pages: int) -> DeviceState:
        speculates = self._config.speculate
        pools = init_cache(self._model_config, num_pages, self._config.page_size, self._dtype, mtp=speculates)
        slots, vocab = self._config.max_slots + 1, self._model_config.vocab_size
        tables = neutral_tables(slots, vocab) if self._config.sampling_tables else None
        drafts = Drafts(jnp.zeros(slots, jnp.int32), jnp.full(slots, -1, jnp.int32)) if speculates else None
        return DeviceState(pools, jnp.zeros(slots, jnp.int32), tables, drafts)

    def _score(self, bucket: Bucket) -> Callable[[Leaves, jax.Array], Results]:
        def score(leaves: Leaves, packed: jax.Array) -> Results:
            batch = unpack(packed, bucket)
            # Constants: XLA drops the whole draw.
            batch = batch._replace(sampling=_greedy(bucket.rows), adjust=None)
            out = score_step(self._rebuild(leaves), batch, num_top=NUM_TOP)
            return pack_outputs(out), out

        return score

    def _cached(self, bucket: Bucket) -> Callable[[Leaves, DeviceState, jax.Array], tuple[DeviceState, Results]]:
        step = _CACHED[bucket.kind]

        def run(leaves: Leaves, state: DeviceState, packed: jax.Array) -> tuple[DeviceState, Results]:
            state, out = step(self._rebuild(leaves), state, unpack(packed, bucket), num_top=NUM_TOP)
            return state, (pack_outputs(out), out)

        return run

    def _replicated(self) -> NamedSharding | None:
        return None if self._mesh is None else replicated(self._mesh)


def _temp_bytes(compiled: Any) -> int:
    """0 where XLA does not say."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return 0
    results = max(0, analysis.output_size_in_bytes - analysis.alias_size_in_bytes)
    return int(analysis.temp_size_in_bytes + results)


def _greedy(rows: int) -> Sampling:
    zeros, ids = jnp.zeros(rows), jnp.zeros(rows, jnp.int32)
    return Sampling(temperature=zeros, top_k=ids, top_p=zeros, min_p=zeros, seed=jnp.zeros((rows, 2), jnp.uint32))

"""A small random DeepSeek-V3-form model (MLA, a dense and a MoE layer, groups, a shared expert, an MTP layer), the
engine's core around one, and what its own full forward says."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from model.checkpoint import build
from model.config import ModelConfig
from model.plan import plan
from model.transformer import Transformer
from serving.config import EngineConfig
from serving.engine.buckets import BucketSet
from serving.engine.kv_pool import KvPool
from serving.engine.loop import Loop
from serving.engine.ring import Ring
from serving.engine.runner import JaxRunner
from serving.engine.scheduler import Events, Scheduler
from serving.engine.sequence import Sequence, make_sequences
from serving.engine.stats import EngineStats
from serving.types import Job, Prepared, Update
from tests.fakes import FakeClock

TINY_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def random_model(config: ModelConfig, seed: int) -> Transformer:
    """As Transformer itself starts, with draws of numpy: JAX's would compile a program a shape."""
    rng = np.random.default_rng(seed)
    graph, params = plan(config, jnp.dtype(jnp.float32))
    fill = {
        "kernel": lambda shape: rng.standard_normal(shape) * shape[-1] ** -0.5,
        "embedding": lambda shape: rng.standard_normal(shape) * 0.02,
        "scale": np.ones,
        "bias": np.zeros,
        "e_score_correction_bias": np.zeros,
    }
    return build(graph, params, lambda param: fill[str(param.path[-1])](param.shape).astype(param.dtype))


def tiny_model(seed: int = 0, **changes: Any) -> Transformer:
    return random_model(ModelConfig.from_hub({**TINY_V3, **changes}), seed)


class Driven:
    """A loop around one warm JaxRunner, turned by hand."""

    def __init__(self, runner: JaxRunner, config: EngineConfig, ring: Ring | None = None, *, context: int = 64) -> None:
        self.runner = runner
        self.pool = KvPool(runner.num_pages, config.page_size, ring)
        self.scheduler = Scheduler(config, BucketSet(runner.buckets), self.pool, context)
        self.clock, self.stats = FakeClock(), EngineStats()
        self.loop = Loop(runner, self.scheduler, self._record, clock=self.clock, stats=self.stats)
        self.updates: dict[Sequence, list[Update]] = {}

    def _record(self, events: Events) -> None:
        for row, update in events:
            self.updates.setdefault(row, []).append(update)

    def run(self, *rows: Prepared) -> list[list[Update]]:
        sequences = make_sequences(self, Job("job", "t", rows))
        for row in sequences:
            self.scheduler.check(row)
            self.scheduler.submit(row, self.clock())
        self.finish()
        return [self.updates[row] for row in sequences]

    def finish(self) -> None:
        while not self.loop.idle:
            self.loop.turn()


class Logprobs:
    """Log-probabilities after each token of a prompt, by one full forward at a fixed shape."""

    def __init__(self, model: Transformer) -> None:
        graph, params = nnx.split(model)

        @jax.jit
        def forward(params: nnx.State, tokens: jax.Array) -> jax.Array:
            merged: Transformer = nnx.merge(graph, params)
            hidden = merged.hidden(tokens, jnp.arange(64)[None, :])
            return jax.nn.log_softmax(merged.logits(hidden))[0]

        self._forward, self._params = forward, params

    def __call__(self, context: list[int]) -> NDArray[np.float32]:
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(context)] = context
        return np.asarray(self._forward(self._params, padded))[: len(context)]

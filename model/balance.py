"""Loss-free balancing of experts: V3's update of the routing bias (arXiv:2412.19437 section 2.1.2, arXiv:2408.15664).

The bias decides only which experts are chosen, never how they are weighed, so no gradient reaches it. After some steps
every expert that got more than its share loses a little bias, and every other one gains it. The forward pass is walked
layer by layer here because a jitted layer keeps its routing to itself.
"""

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from .arithmetic import Arithmetic
from .moe import MixtureOfExperts, Router
from .rope import RopeTable, rope_table
from .train import Examples, TrainState
from .transformer import DecoderLayer, Transformer

Balance = Callable[[TrainState, Examples], TrainState]


def make_balance(graph: nnx.GraphDef, speed: float) -> Balance:
    """The jitted update of every routing bias by +-speed from one batch. It donates its state."""

    @partial(jax.jit, donate_argnums=0)
    def balance(state: TrainState, examples: Examples) -> TrainState:
        model: Transformer = nnx.merge(graph, state.params)
        for router, load in list(expert_loads(model, examples)):
            bias = router.e_score_correction_bias
            assert bias is not None
            bias[...] = bias[...] + speed * jnp.sign(load.mean() - load)
        return state._replace(params=nnx.state(model))

    return balance


def expert_loads(model: Transformer, examples: Examples) -> Iterator[tuple[Router, Float[Array, " e"]]]:
    """Real tokens that each expert gets, for every `noaux_tc` router of the model, the MTP layer's included."""
    tokens = examples.tokens
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    real = jnp.arange(tokens.shape[1]) < examples.length[:, None]
    x = model.embed_tokens(tokens)
    for config, layer in zip(model.config.layers, model.layers, strict=True):
        x, loads = _walk(layer, x, rope_table(config.attention.rope, positions), real, model.arithmetic)
        yield from loads
    for config, layer in zip(model.config.mtp_layers, model.mtp, strict=True):
        joined = layer.join(model.embed_tokens(tokens[:, 1:]), model.norm(x)[:, :-1])
        yield from _walk(
            layer, joined, rope_table(config.attention.rope, positions[:, :-1]), real[:, 1:], model.arithmetic
        )[1]


def _walk(
    layer: DecoderLayer, x: Float[Array, "b t d"], table: RopeTable, real: Bool[Array, "b t"], arithmetic: Arithmetic
) -> tuple[Float[Array, "b t d"], list[tuple[Router, Float[Array, " e"]]]]:
    """One layer's output, and the loads of its router if it has one that is balanced."""
    x = x + layer.self_attn(layer.input_layernorm(x), table, None, arithmetic.attention_impl)[0]
    h = layer.post_attention_layernorm(x)
    if not isinstance(layer.mlp, MixtureOfExperts):
        return x + layer.mlp(h), []
    router = layer.mlp.gate
    chosen = router(h.reshape(-1, h.shape[-1]))[0]
    load = jnp.zeros((router.config.num_experts,)).at[chosen].add(real.reshape(-1, 1))
    loads = [(router, load)] if router.e_score_correction_bias is not None else []
    return x + layer.mlp(h, impl=arithmetic.moe_impl), loads

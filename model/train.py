"""One training step for a model that scores labels: its losses, the optimiser, and the state that it moves.

The main loss is what scoring asks: minus the log-probability of the label's tokens right after the prompt. A language
loss over every token keeps the row's own structure in the hidden states, and V3's multi-token-prediction loss
(arXiv:2412.19437 section 2.2) trains the MTP layer. Both may be taken on part of a batch, since over a large vocabulary
they cost as much as the rest. Fine-tuning and quantisation-aware training use the same step: the model is whatever
`graph` merges into.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from .transformer import Transformer

Tree = Any  # a pytree of arrays


class Examples(NamedTuple):
    """A batch: prompt, label, end, then padding."""

    tokens: Int[Array, "b t"]
    prompt: Int[Array, " b"]  # tokens of the prompt; the label's first token stands at this index
    length: Int[Array, " b"]  # tokens without padding
    label: Int[Array, " b"]  # which of the template's labels it is


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train. Weights of losses are relative to the label's."""

    num_steps: int
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    final_fraction: float = 0.02  # of the learning rate, at the end of the cosine
    weight_decay: float = 0.1  # of matrices; never of norms and biases
    clip_norm: float = 1.0
    average: float = 0.99  # decay of the running mean of the weights, which is what is kept
    label_width: int = 1  # tokens of the longest label
    language: float = 0.005
    mtp: float = 0.005
    auxiliary_rows: int = 64  # rows of a batch that the two losses above are taken on


class Losses(NamedTuple):
    total: Float[Array, ""]
    label: Float[Array, ""]
    language: Float[Array, ""]
    mtp: Float[Array, ""]


class TrainState(NamedTuple):
    """Everything that a step changes, and so everything that a checkpoint must hold."""

    params: Tree
    average: Tree
    optimizer: Tree
    step: Int[Array, ""]


Step = Callable[[TrainState, Examples], tuple[TrainState, Losses]]


def losses(model: Transformer, examples: Examples, recipe: Recipe) -> Losses:
    """`label` is a mean over rows, `language` and `mtp` over real tokens."""
    hidden = _hidden(model, examples.tokens)
    label = _label_loss(model, hidden, examples, recipe.label_width)
    rows = min(recipe.auxiliary_rows, examples.tokens.shape[0])
    language = mtp = jnp.zeros(())
    h, tokens, length = hidden[:rows], examples.tokens[:rows], examples.length[:rows]
    if recipe.language:
        language = _token_loss(model.logits(h[:, :-1]), tokens[:, 1:], _real(tokens, length, first=1))
    if recipe.mtp and model.config.num_mtp_layers:
        logits = model.mtp_logits(h[:, :-2], tokens[:, 1:-1])
        mtp = _token_loss(logits, tokens[:, 2:], _real(tokens, length, first=2))
    return Losses(label + recipe.language * language + recipe.mtp * mtp, label, language, mtp)


def _label_loss(model: Transformer, hidden: Float[Array, "b t d"], examples: Examples, width: int) -> Float[Array, ""]:
    """The label's tokens lie between the prompt and the end token, at most `width` of them."""
    places = examples.prompt[:, None] + jnp.arange(width)  # [b, width]
    real = places < examples.length[:, None] - 1
    logits = model.logits(jnp.take_along_axis(hidden, places[:, :, None] - 1, axis=1, mode="clip"))
    targets = jnp.take_along_axis(examples.tokens, places, axis=1, mode="clip")
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.where(real, loss, 0).sum(1).mean()


def _hidden(model: Transformer, tokens: Int[Array, "b t"]) -> Float[Array, "b t d"]:
    return model.hidden(tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))


def _real(tokens: Int[Array, "b t"], length: Int[Array, " b"], *, first: int) -> Bool[Array, "b s"]:
    """Which of the targets from position `first` on are not padding."""
    return jnp.arange(first, tokens.shape[1])[None, :] < length[:, None]


def _token_loss(
    logits: Float[Array, "b s v"], targets: Int[Array, "b s"], real: Bool[Array, "b s"]
) -> Float[Array, ""]:
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.where(real, loss, 0).sum() / jnp.maximum(real.sum(), 1)


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW under a clipped gradient norm; linear warm-up, then a cosine."""
    peak, final = recipe.learning_rate, recipe.learning_rate * recipe.final_fraction
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, recipe.warmup_steps, recipe.num_steps, final)
    adamw = optax.adamw(rate, b2=0.98, weight_decay=recipe.weight_decay, mask=_matrices)
    return optax.chain(optax.clip_by_global_norm(recipe.clip_norm), adamw)


def _matrices(params: Tree) -> Tree:
    return jax.tree.map(lambda p: p.ndim >= 2, params)


def init_state(params: Tree, recipe: Recipe) -> TrainState:
    """State before the first step. `params` is copied: a step donates its state."""
    own, average = (jax.tree.map(jnp.array, params) for _ in range(2))
    return TrainState(own, average, make_optimizer(recipe).init(own), jnp.zeros((), jnp.int32))


def make_step(graph: nnx.GraphDef, recipe: Recipe) -> Step:
    """The jitted step. It donates its state: use the one that it returns. One compilation per batch shape."""
    optimizer = make_optimizer(recipe)

    def objective(params: Tree, examples: Examples) -> tuple[jax.Array, Losses]:
        parts = losses(nnx.merge(graph, params), examples, recipe)
        return parts.total, parts

    @partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, examples: Examples) -> tuple[TrainState, Losses]:
        gradient, parts = jax.grad(objective, has_aux=True)(state.params, examples)
        updates, moved = optimizer.update(gradient, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, _averaged(state, params, recipe.average), moved, state.step + 1), parts

    return step


def _averaged(state: TrainState, params: Tree, decay: float) -> Tree:
    """Running mean of the weights; shorter at first, so that the start is forgotten."""
    keep = jnp.minimum(decay, (1 + state.step) / (10 + state.step))
    return jax.tree.map(lambda mean, new: mean * keep + new * (1 - keep), state.average, params)

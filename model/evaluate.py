"""How good a label scorer is on rows with known labels: probabilities, accuracy, area under the ROC curve."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from .examples import Rows, pack
from .transformer import Transformer


def auc(scores: NDArray[np.floating], positive: NDArray[np.bool_]) -> float:
    """The probability that a positive row scores above a negative one, ties counting half (Mann-Whitney U).

    Raises ValueError where one of the two classes is empty.
    """
    count = int(positive.sum())
    if count in (0, len(positive)):
        raise ValueError("the area under the curve needs rows of both classes")
    _, place, ties = np.unique(scores, return_inverse=True, return_counts=True)
    rank = (np.cumsum(ties) - (ties - 1) / 2)[place]  # mean rank within a tie, from 1
    above = rank[positive].sum() - count * (count + 1) / 2
    return float(above / (count * (len(positive) - count)))


def best_threshold(
    scores: NDArray[np.floating], positive: NDArray[np.bool_], *, slack: float = 0.0
) -> tuple[float, float]:
    """(threshold, accuracy) with the most rows right when scores >= threshold are called positive.

    The threshold lies midway between two scores. Of those within `slack` of the best accuracy it is the one nearest to
    0.5: on a few thousand rows the very best one is luck, and a calibrated scorer's is 0.5.
    """
    order = np.argsort(scores, kind="stable")
    ordered, hits = scores[order], positive[order].astype(np.int64)
    # Cut i: rows below i are called negative, the others positive.
    right = np.concatenate([[0], np.cumsum(1 - hits)]) + hits.sum() - np.concatenate([[0], np.cumsum(hits)])
    cuts = np.concatenate([[0.0], (ordered[1:] + ordered[:-1]) / 2, [1.0]])
    separates = np.concatenate([[True], ordered[1:] > ordered[:-1], ordered[-1:] < 1])
    candidates = np.flatnonzero(separates & (right >= right[separates].max() - slack * len(scores)))
    chosen = candidates[np.argmin(np.abs(cuts[candidates] - 0.5))]
    return float(cuts[chosen]), float(right[chosen] / len(scores))


def label_probabilities(
    model: Transformer, rows: Rows, labels: tuple[tuple[int, ...], ...], *, batch_rows: int = 250
) -> NDArray[np.float64]:
    """[n, labels]: softmax over the labels' first tokens after each prompt. Prompts may differ in length.

    For labels of one token this is what the server answers; others must differ in the first one (else ValueError).
    """
    if len({label[0] for label in labels}) < len(labels):
        raise ValueError(f"labels must differ in their first token, got {labels}")
    width = max(map(len, rows.prompts))
    score = _scorer(model, tuple(label[0] for label in labels))
    parts = []
    for start in range(0, len(rows), batch_rows):
        # The last batch is filled up with repeated rows: one shape, one compilation.
        indices = [min(i, len(rows) - 1) for i in range(start, start + batch_rows)]
        batch = pack(rows.take(indices), labels, labels[0][0], width + max(map(len, labels)) + 1)
        parts.append(np.asarray(score(batch.tokens[:, :width], batch.prompt), np.float64))
    logits = np.concatenate(parts)[: len(rows)]
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def _scorer(model: Transformer, first_tokens: tuple[int, ...]) -> Callable[[jax.Array, jax.Array], jax.Array]:
    graph, params = nnx.split(model)
    wanted = jnp.asarray(first_tokens)

    @jax.jit
    def score(params: nnx.State, tokens: jax.Array, prompt: jax.Array) -> jax.Array:
        merged: Transformer = nnx.merge(graph, params)
        hidden = merged.hidden(tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))
        last = jnp.take_along_axis(hidden, prompt[:, None, None] - 1, axis=1)[:, 0]
        return merged.logits(last)[:, wanted]

    return lambda tokens, prompt: score(params, tokens, prompt)

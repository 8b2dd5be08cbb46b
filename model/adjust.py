"""What a request changes about the logits before a token is drawn: penalties, a bias, the tokens that it allows.

Order, all on the raw logits: repetition penalty (CTRL, arXiv:1909.05858 section 4.1, in the form of transformers:
positive logits of tokens in prompt or output are divided, negative ones multiplied), then OpenAI's frequency and
presence penalties (platform.openai.com/docs, "frequency and presence penalties": of generated tokens alone), then the
bias, then tokens that are not allowed become -inf. A row's share lies in device tables by slot, which are written when
the row first samples (`set_row`), counted by the step itself (`count`), so that a step can be dispatched before the
last one's token is read. Row 0 of every table is neutral for ever: what adjusts nothing points there.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

PROMPT = 1 << 30  # in `counts`: the token is in the prompt; the bits below count how often it was generated
WORD = 32  # tokens in one word of `allowed`


class Tables(NamedTuple):
    """By slot, row 0 neutral. For 64 slots and 129,280 tokens counts and bias take 34 MB each, allowed 1 MB."""

    counts: Int[Array, "slots v"]
    bias: Float[Array, "slots v"]
    allowed: UInt32[Array, "slots words"]  # bit i of word w: token 32 w + i may be drawn


class Adjust(NamedTuple):
    """Per row of a batch; table 0: the row adjusts nothing, and counts nothing."""

    table: Int[Array, " b"]
    repetition_penalty: Float[Array, " b"]  # 1: off
    presence_penalty: Float[Array, " b"]  # 0: off
    frequency_penalty: Float[Array, " b"]  # 0: off


def num_words(vocab: int) -> int:
    return -(-vocab // WORD)


def table_bytes(slots: int, vocab: int) -> int:
    return slots * 4 * (2 * vocab + num_words(vocab))


def neutral_tables(slots: int, vocab: int) -> Tables:
    return Tables(
        jnp.zeros((slots, vocab), jnp.int32),
        jnp.zeros((slots, vocab), jnp.float32),
        jnp.full((slots, num_words(vocab)), 0xFFFFFFFF, jnp.uint32),
    )


def set_row(
    tables: Tables,
    slot: Int[Array, ""],
    counts: Int[Array, " v"],
    bias: Float[Array, " v"],
    allowed: UInt32[Array, " words"],
) -> Tables:
    """The tables with one slot's row replaced, whatever its last owner left there."""
    return Tables(
        tables.counts.at[slot].set(counts), tables.bias.at[slot].set(bias), tables.allowed.at[slot].set(allowed)
    )


def set_allowed(tables: Tables, slots: Int[Array, " n"], allowed: UInt32[Array, "n words"]) -> Tables:
    """New masks for some slots; slot 0 among them: no slot."""
    return tables._replace(allowed=tables.allowed.at[_or_none(slots, tables)].set(allowed, mode="drop"))


def count(tables: Tables, adjust: Adjust, token: Int[Array, " b"]) -> Tables:
    """One more of each row's token, written in place; nothing where no row of the batch adjusts anything."""
    at = (_or_none(adjust.table, tables), token)

    def add(counts: jax.Array) -> jax.Array:
        return counts.at[at].add(1, mode="drop")

    counts = jax.lax.cond((adjust.table != 0).any(), add, lambda same: same, tables.counts)
    return tables._replace(counts=counts)


def adjusted(
    logits: Float[Array, "b v"], tables: Tables, adjust: Adjust, also: Int[Array, " b"] | None = None
) -> Float[Array, "b v"]:
    """The logits to draw from. Where no row of the batch adjusts anything, the tables are not read. `also`: a token of
    each row that counts as generated, beside those of the tables; -1: none."""
    also = jnp.full(len(logits), -1, jnp.int32) if also is None else also
    return jax.lax.cond((adjust.table != 0).any(), _adjust, lambda raw, *_: raw, logits, tables, adjust, also)


def _adjust(logits: Float[Array, "b v"], tables: Tables, adjust: Adjust, also: Int[Array, " b"]) -> Float[Array, "b v"]:
    counts = tables.counts[adjust.table] + (jnp.arange(logits.shape[-1]) == also[:, None])
    generated = counts & (PROMPT - 1)
    penalty = adjust.repetition_penalty[:, None]
    repelled = jnp.where(logits > 0, logits / penalty, logits * penalty)
    out = jnp.where(counts > 0, repelled, logits)
    out -= adjust.frequency_penalty[:, None] * generated
    out -= adjust.presence_penalty[:, None] * (generated > 0)
    out += tables.bias[adjust.table]
    return jnp.where(_unpacked(tables.allowed[adjust.table], logits.shape[-1]), out, -jnp.inf)


def _unpacked(words: UInt32[Array, "b words"], vocab: int) -> Array:
    """[b, vocab] booleans."""
    bits = (words[:, :, None] >> jnp.arange(WORD, dtype=jnp.uint32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :vocab] != 0


def _or_none(slots: Int[Array, " n"], tables: Tables) -> Int[Array, " n"]:
    """0 becomes an index that no table has, whose writes are dropped."""
    return jnp.where(slots == 0, tables.counts.shape[0], slots)

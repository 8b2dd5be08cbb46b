"""Writes the slots' logit tables on the device: the two programs beside the buckets' own, compiled at warm-up.

A batch says which rows are new and which masks have changed; both are written before its step. Invariant: the tables
that go in are donated, so whoever calls keeps what comes out and nothing else.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from numpy.typing import NDArray

from model.adjust import PROMPT, WORD, Tables, num_words, set_allowed, set_row
from serving.batch import SlotMask, SlotTable

MASKS_AT_ONCE = 16  # slots whose masks go to the device in one transfer


class TableWriter:
    """`sharding`: how small arrays lie on the devices; None: on the one there is."""

    def __init__(self, vocab: int, tables: Tables, sharding: Sharding | None) -> None:
        self._vocab, self._sharding = vocab, sharding
        words = num_words(vocab)
        row = [((), np.int32), ((vocab,), np.int32), ((vocab,), np.float32), ((words,), np.uint32)]
        self._set_row = self._compile(set_row, tables, row)
        masks = [((MASKS_AT_ONCE,), np.int32), ((MASKS_AT_ONCE, words), np.uint32)]
        self._set_allowed = self._compile(set_allowed, tables, masks)

    def write(self, tables: Tables, rows: tuple[SlotTable, ...], masks: tuple[SlotMask, ...]) -> Tables:
        """`tables` is gone afterwards."""
        for row in rows:
            tables = self._set_row(tables, *self._placed(np.int32(row.slot), *dense(row, self._vocab)))
        for at in range(0, len(masks), MASKS_AT_ONCE):
            tables = self._set_allowed(tables, *self._placed(*_stacked(masks[at : at + MASKS_AT_ONCE], self._vocab)))
        return tables

    def _compile(self, program: Callable[..., Tables], tables: Tables, arguments: list[Any]) -> Callable[..., Tables]:
        shapes = [jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding) for shape, dtype in arguments]
        jitted = jax.jit(program, out_shardings=self._sharding, donate_argnums=(0,))
        compiled: Callable[..., Tables] = jitted.lower(tables, *shapes).compile()
        return compiled

    def _placed(self, *arrays: Any) -> Any:
        return arrays if self._sharding is None else jax.device_put(arrays, self._sharding)


def dense(row: SlotTable, vocab: int) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.uint32]]:
    """counts, bias and allowed of model.adjust.Tables for one slot."""
    counts = np.bincount(row.generated, minlength=vocab).astype(np.int32)
    counts[row.prompt] |= PROMPT
    bias = np.zeros(vocab, np.float32)
    for token, value in row.bias:
        bias[token] = value
    return counts, bias, pack_ids(row.allowed, vocab)


def pack_ids(ids: tuple[int, ...] | None, vocab: int) -> NDArray[np.uint32]:
    """[words] with the bits of `ids`; None: all of them."""
    if ids is None:
        return np.full(num_words(vocab), 0xFFFFFFFF, np.uint32)
    bits = np.zeros(num_words(vocab) * WORD, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def _stacked(masks: tuple[SlotMask, ...], vocab: int) -> tuple[NDArray[np.int32], NDArray[np.uint32]]:
    slots = np.zeros(MASKS_AT_ONCE, np.int32)
    words = np.zeros((MASKS_AT_ONCE, num_words(vocab)), np.uint32)
    for i, mask in enumerate(masks):
        slots[i], words[i] = mask.slot, mask.words
    return slots, words

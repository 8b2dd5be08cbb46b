"""Training examples from a table's rows: prompts, batches, and words dropped or shifted at random.

Disturbed words are what keeps a small model from learning sixteen thousand rows by heart.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from .template import Template
from .tokenizer import Tokenizer
from .train import Examples


@dataclass(frozen=True, slots=True)
class Rows:
    """prompts: token ids of each row, bos included where the tokenizer adds it; label [n]: index in the template."""

    prompts: tuple[tuple[int, ...], ...]
    label: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, indices: Iterable[int]) -> "Rows":
        chosen = list(indices)
        return Rows(tuple(self.prompts[i] for i in chosen), self.label[chosen])


def encode_rows(rows: Sequence[Mapping[str, object]], template: Template, tokenizer: Tokenizer) -> Rows:
    """Raises TemplateError where a row lacks a column or its label."""
    index = {label.name: i for i, label in enumerate(template.labels)}
    label = [index[template.label_of(row.get(template.label_column)).name] for row in rows]
    bos = (tokenizer.bos_id,) if tokenizer.add_bos and tokenizer.bos_id is not None else ()
    encoded = tokenizer.encode_batch([template.render(row) for row in rows])
    return Rows(tuple((*bos, *ids) for ids in encoded), np.asarray(label, np.int32))


def label_ids(template: Template, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each label's tokens, in the template's order."""
    return tuple(tuple(ids) for ids in tokenizer.encode_batch([label.text for label in template.labels]))


def pack(rows: Rows, labels: Sequence[Sequence[int]], end: int, width: int | None = None) -> Examples:
    """Prompt, label, end token, padded with the end token to `width` (None: the longest row's)."""
    texts = [(*p, *labels[i], end) for p, i in zip(rows.prompts, rows.label, strict=True)]
    length = np.array([len(t) for t in texts], np.int32)
    tokens = np.full((len(texts), width or int(length.max())), end, np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    prompt = np.array([len(p) for p in rows.prompts], np.int32)
    return Examples(*map(jnp.asarray, (tokens, prompt, length, rows.label)))


def neighbours(template: Template, tokenizer: Tokenizer) -> NDArray[np.int32]:
    """[vocab, 2]: the tokens of the next lower and the next higher word of the same name; elsewhere the token itself.

    Raises ValueError where a word is not one token.
    """
    table = np.repeat(np.arange(tokenizer.vocab_size, dtype=np.int32)[:, None], 2, axis=1)
    for word in template.words:
        ids = tokenizer.encode_batch([f" {text}" for text in word.vocabulary])
        if any(len(i) != 1 for i in ids):
            raise ValueError(f"words.{word.name}: a word is more than one token of this tokenizer")
        flat = [i[0] for i in ids]
        table[flat[1:], 0] = flat[:-1]
        table[flat[:-1], 1] = flat[1:]
    return table


def shift_words(rng: np.random.Generator, rows: Rows, table: NDArray[np.int32], rate: float) -> Rows:
    """Replace that share of the words by a neighbour (`neighbours`): edges between words become soft."""

    def shift(prompt: tuple[int, ...]) -> tuple[int, ...]:
        ids = np.asarray(prompt)
        side = rng.integers(0, 2, len(ids))
        return tuple(np.where(rng.random(len(ids)) < rate, table[ids, side], ids).tolist())

    return Rows(tuple(map(shift, rows.prompts)), rows.label)


def drop_words(rng: np.random.Generator, rows: Rows, rate: float) -> Rows:
    """Drop tokens inside the prompts, on average `rate` of them: in each row from none to twice that.

    The first and the last token stay: bos, and the word that asks for the label.
    """

    def thin(prompt: tuple[int, ...]) -> tuple[int, ...]:
        keep = rng.random(len(prompt)) >= rng.random() * 2 * rate
        keep[[0, -1]] = True
        return tuple(np.asarray(prompt)[keep].tolist())

    return Rows(tuple(map(thin, rows.prompts)), rows.label)

"""Labels as token sequences, the engine rows that score them, and the softmax over their log-probabilities.

A label's tokens are the encoding of its text alone, placed after the prompt's ids. Labels of one token are all read
from one row's `targets` (NUM_TARGETS a row); a longer label gets a row of its own, prompt + label, whose last
prompt log-probabilities are summed. The probabilities are the softmax over log P(label tokens | prompt).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from serving.batch import NUM_TARGETS
from serving.errors import BadRequest, ServingError, StepFailed
from serving.types import Prepared, Update

from .language import Language, RowTemplate

Decide = Callable[[Mapping[str, float]], str]


@dataclass(frozen=True, slots=True)
class LabelText:
    """A label that a client asks for: `text` is what follows the prompt; None: the template's text, or the name."""

    name: str
    text: str | None = None


def _most_likely(probabilities: Mapping[str, float]) -> str:
    return max(probabilities, key=lambda name: probabilities[name])


@dataclass(frozen=True)
class LabelSet:
    """Labels and their tokens. What every row needs of them is computed once a set."""

    names: tuple[str, ...]
    sequences: tuple[tuple[int, ...], ...]
    decide: Decide = _most_likely

    @cached_property
    def longest(self) -> int:
        return max(map(len, self.sequences))

    @cached_property
    def num_rows(self) -> int:
        """Engine rows an input."""
        return len(self._targets) + len(self._long)

    def rows(self, prompt: tuple[int, ...]) -> list[Prepared]:
        """Engine rows that score every label after `prompt`, in the order that `probabilities` expects."""
        rows = [Prepared(prompt, targets=targets) for targets in self._targets]
        if self._long:
            rows += [Prepared(prompt + sequence, prompt_logprobs=0) for sequence in self._long]
        return rows

    def probabilities(self, results: Sequence[Update]) -> dict[str, float]:
        """Softmax over the labels, from the answers of `rows`; raises ServingError where one failed."""
        logprobs: list[float] = []
        for result in results:
            if result.error is not None:
                raise _as_serving_error(result.error)
            logprobs += result.target_logprobs  # a row of a longer label has none
        if self._long:
            logprobs = self._with_long(logprobs, results[len(self._targets) :])
        return _softmax(self.names, logprobs)

    def _with_long(self, short: Sequence[float], results: Sequence[Update]) -> list[float]:
        """In the order of the labels: `short` for those of one token, sums over the `results` of the others."""
        ones, others = iter(short), iter(results)
        return [
            next(ones)
            if len(sequence) == 1
            else sum(token.logprob for token in next(others).prompt_logprobs[-len(sequence) :])
            for sequence in self.sequences
        ]

    @cached_property
    def _targets(self) -> tuple[tuple[int, ...], ...]:
        """The labels of one token, as many a row as its targets hold."""
        short = tuple(sequence[0] for sequence in self.sequences if len(sequence) == 1)
        return tuple(short[first : first + NUM_TARGETS] for first in range(0, len(short), NUM_TARGETS))

    @cached_property
    def _long(self) -> tuple[tuple[int, ...], ...]:
        return tuple(sequence for sequence in self.sequences if len(sequence) > 1)


def resolve_labels(language: Language, template: RowTemplate | None, asked: Sequence[LabelText] | None) -> LabelSet:
    """The labels of a request: the template's own, or those asked for. Raises BadRequest.

    A name that the template has takes the template's text; any other name is its own text. The template decides
    (by its threshold) when all of its labels take part and no other; else the most likely label is returned.
    """
    own = {label.name: label.text for label in template.labels} if template is not None else {}
    if asked is None:
        asked = [LabelText(name) for name in own]
    if len(asked) < 2:
        raise BadRequest(
            "labels: at least two are needed (this model has no template that brings its own)"
            if not own
            else "labels: at least two are needed",
            param="labels",
        )
    names = tuple(label.name for label in asked)
    if len(set(names)) != len(names):
        raise BadRequest("labels: a name is there twice", param="labels")
    texts = [label.text if label.text is not None else own.get(label.name, label.name) for label in asked]
    sequences = tuple(tuple(language.tokenizer.encode(text)) for text in texts)
    if not all(sequences):
        raise BadRequest("labels: a label's text is empty", param="labels")
    if len(set(sequences)) != len(sequences):
        raise BadRequest("labels: two labels have the same tokens", param="labels")
    if template is not None and set(names) == set(own) and all(label.text is None for label in asked):
        return LabelSet(names, sequences, template.decide)
    return LabelSet(names, sequences)


def _softmax(names: Sequence[str], logprobs: Sequence[float]) -> dict[str, float]:
    """StepFailed where a value is NaN or none is finite."""
    top = max(logprobs)
    weights = [math.exp(value - top) for value in logprobs]
    total = math.fsum(weights)
    if not math.isfinite(total):
        raise StepFailed("the model gave no label a finite probability")
    return {name: weight / total for name, weight in zip(names, weights, strict=True)}


def _as_serving_error(error: Exception) -> ServingError:
    return error if isinstance(error, ServingError) else StepFailed("the step of this input failed")

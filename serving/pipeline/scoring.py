"""The stages of scoring around the engine: `prepare_scores` (render, encode) and `ScorePlan.fold` (softmax, decide).

Both are synchronous and free of HTTP: the server calls them from its encode pool and its event loop, `tidegate score`
from its own thread, and the same row gets the same rows of the engine either way.

    plan = prepare_scores(language, [FeatureInput({...}), TextInput("...")])
    job = Job(id, tenant, plan.rows); collected = Collected(len(plan.rows))
    ... collected.add(updates) until it says True ...
    scores = plan.fold(collected)          # one Score per input, errors in their places
"""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from serving.errors import ContextLengthExceeded, ServingError
from serving.types import FeatureInput, Input, Prepared, Score, Update

from .collect import Collected
from .labels import LabelSet, LabelText, resolve_labels
from .language import Language
from .prompts import Prompt, encode_inputs, find_template


class _Place(Struct, frozen=True):
    """Where an input's rows are: rows[first : first + labels.num_rows]; `error` set: it has none."""

    labels: LabelSet | None
    first: int = 0
    error: ServingError | None = None


@dataclass(frozen=True, slots=True)
class ScorePlan:
    rows: tuple[Prepared, ...]
    num_prompt_tokens: int
    places: tuple[_Place, ...]

    def num_cached(self, collected: Collected) -> int:
        """Prompt tokens that the prefix cache saved, as each input's first row tells."""
        results = collected.rows
        return sum([results[place.first].num_cached for place in self.places if place.labels is not None])

    def fold(self, collected: Collected) -> tuple[Score, ...]:
        """One Score per input, in order; needs every row to have ended."""
        results = collected.rows
        return tuple([_fold_one(index, place, results) for index, place in enumerate(self.places)])


def prepare_scores(
    language: Language,
    inputs: Sequence[Input | ServingError],
    *,
    labels: Sequence[LabelText] | None = None,
    template: str | None = None,
) -> ScorePlan:
    """Rows for the engine. An input that is or becomes an error has no rows and folds to a Score with that error.

    `template` is the request's; a FeatureInput's own wins. Raises BadRequest for labels that no row could use.
    """
    chosen = [_with_template(item, template) for item in inputs]
    label_sets = _LabelSets(language, labels)
    if labels is not None or language.default_template is None:
        label_sets.get(template)  # wrong labels are the request's error, not each row's
    rows: list[Prepared] = []
    places: list[_Place] = []
    num_tokens = 0
    for item, prompt in zip(chosen, encode_inputs(language, chosen), strict=True):
        try:
            labelled = label_sets.get(item.template if isinstance(item, FeatureInput) else template)
            ids = _fitting(language, prompt, labelled)
        except ServingError as error:
            places.append(_Place(None, error=error))
            continue
        places.append(_Place(labelled, len(rows)))
        rows += labelled.rows(ids)
        num_tokens += len(ids)
    return ScorePlan(tuple(rows), num_tokens, tuple(places))


class _LabelSets:
    """Label sets by template name, resolved once a request."""

    def __init__(self, language: Language, asked: Sequence[LabelText] | None) -> None:
        self._language = language
        self._asked = asked
        self._by_template: dict[str | None, LabelSet] = {}

    def get(self, name: str | None) -> LabelSet:
        if name not in self._by_template:
            bare = name is None and self._language.default_template is None
            template = None if bare else find_template(self._language, name)
            self._by_template[name] = resolve_labels(self._language, template, self._asked)
        return self._by_template[name]


def _with_template(item: Input | ServingError, template: str | None) -> Input | ServingError:
    if template is not None and isinstance(item, FeatureInput) and item.template is None:
        return FeatureInput(item.features, template)
    return item


def _fitting(language: Language, prompt: Prompt | ServingError, labels: LabelSet) -> Prompt:
    if isinstance(prompt, ServingError):
        raise prompt
    room = language.max_context - (labels.longest if labels.longest > 1 else 0)
    if len(prompt) > room:
        raise ContextLengthExceeded(
            f"this model's context is {language.max_context} tokens; "
            f"the prompt has {len(prompt)} and the longest label {labels.longest}"
        )
    return prompt


def _fold_one(index: int, place: _Place, results: Sequence[Update]) -> Score:
    if place.labels is None:
        return Score(index, error=place.error)
    mine = results[place.first : place.first + place.labels.num_rows]
    try:
        probabilities = place.labels.probabilities(mine)
    except ServingError as error:
        return Score(index, error=error)
    return Score(index, place.labels.decide(probabilities), probabilities)

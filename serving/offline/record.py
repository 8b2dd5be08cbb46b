"""One row of an input file, and what the pipeline makes of it.

A row is features for the model's template, unless it has one of the fields that a request has: `features`, `messages`,
or a `text` that is no column of the template. Whatever else the row holds travels to the output untouched.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serving.errors import BadRequest, ServingError
from serving.pipeline.language import Language
from serving.types import ChatInput, FeatureInput, Input, TextInput


@dataclass(frozen=True, slots=True)
class Record:
    """`number` counts rows from 1. `error`: the row could not be read, `values` is what could."""

    number: int
    values: Mapping[str, Any] = field(default_factory=dict)
    error: ServingError | None = None


def to_input(record: Record, language: Language, template: str | None) -> Input | ServingError:
    """The pipeline's input for a record, or the record's own error."""
    if record.error is not None:
        return record.error
    values, columns = record.values, _columns(language, template)
    if "messages" in values and "messages" not in columns:
        return _chat(values["messages"])
    if "features" in values and "features" not in columns:
        return _features(values["features"], template)
    if "text" in values and "text" not in columns:
        text = values["text"]
        return TextInput(text) if isinstance(text, str) else BadRequest("text must be a string", param="text")
    return FeatureInput(values, template)


def _columns(language: Language, template: str | None) -> Sequence[str]:
    name = template or language.default_template
    known = language.templates.get(name) if name is not None else None
    return () if known is None else known.columns


def _chat(messages: Any) -> Input | ServingError:
    if isinstance(messages, list) and all(isinstance(m, dict) for m in messages):
        return ChatInput(tuple(messages))
    return BadRequest("messages must be a list of objects", param="messages")


def _features(features: Any, template: str | None) -> Input | ServingError:
    if isinstance(features, dict):
        return FeatureInput(features, template)
    return BadRequest("features must be an object", param="features")

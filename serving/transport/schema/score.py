"""POST /v1/score."""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from .common import ErrorOut, LatencyName, PriorityName, ProfileId, TimeoutMs, UsageOut


class ScoreInput(Struct, frozen=True, forbid_unknown_fields=True):
    """One row: exactly one of `features`, `text`, `messages`, `token_ids`."""

    features: (
        Annotated[
            dict[str, Any],
            Meta(description="Column to value, rendered by the template; columns it does not use are ignored."),
        ]
        | None
    ) = None
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None
    template: Annotated[str, Meta(description="The row's own template; else the request's.")] | None = None


class LabelIn(Struct, frozen=True, forbid_unknown_fields=True):
    """A label under a name of its own; `text` is what follows the prompt."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    text: Annotated[str, Meta(min_length=1, max_length=4096)]


class ScoreIn(Struct, frozen=True):
    """Each input is read on its own (as a ScoreInput), so that a malformed one fails alone."""

    inputs: Annotated[
        list[Any], Meta(min_length=1, extra_json_schema={"items": {"$ref": "#/components/schemas/ScoreInput"}})
    ]
    model: str | None = None
    labels: (
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=4096)] | LabelIn],
            Meta(
                min_length=2, max_length=256, description="Default: the template's. A name that it has takes its text."
            ),
        ]
        | None
    ) = None
    template: str | None = None
    priority: PriorityName | None = None
    latency_class: LatencyName | None = None
    timeout_ms: TimeoutMs | None = None
    profile_id: ProfileId | None = None


class ScoreResult(Struct, frozen=True):
    """`error` alone, or the label with all probabilities."""

    index: int
    label: str | UnsetType = UNSET
    probabilities: Mapping[str, float] | UnsetType = UNSET
    tier: str | UnsetType = UNSET
    error: ErrorOut | UnsetType = UNSET


class TimingOut(Struct, frozen=True):
    encode_ms: float
    engine_ms: float
    total_ms: float


class ScoreOut(Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    results: list[ScoreResult]
    usage: UsageOut
    timing: TimingOut

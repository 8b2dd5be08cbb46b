"""POST /v1/completions, in the form of OpenAI."""

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from .common import (
    MAX_TOP,
    AllowedTokenIds,
    GuidedChoice,
    GuidedJson,
    GuidedRegex,
    LatencyName,
    LogitBias,
    MaxTokens,
    MinP,
    NumChoices,
    Penalty,
    PriorityName,
    ProfileId,
    RepetitionPenalty,
    ResponseFormat,
    Seed,
    Stop,
    StopTokenIds,
    StreamOptions,
    Temperature,
    TimeoutMs,
    TopK,
    TopP,
    UsageOut,
)


class CompletionIn(Struct, frozen=True):
    prompt: Annotated[
        str | list[str | int | list[int]],
        Meta(
            description="Text, token ids, or a list of either. Text never becomes control tokens; it starts with BOS "
            "when the tokenizer's config says so. Ids are taken as they are. A prompt of no tokens is BOS alone."
        ),
    ]
    model: str | None = None
    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    n: NumChoices | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    response_format: ResponseFormat | None = None
    guided_json: GuidedJson | None = None
    guided_regex: GuidedRegex | None = None
    guided_choice: GuidedChoice | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: PriorityName | None = None
    latency_class: LatencyName | None = None
    timeout_ms: TimeoutMs | None = None
    profile_id: ProfileId | None = None


class CompletionLogprobs(Struct, frozen=True):
    """Parallel arrays, one entry a token. null: the first token of an echoed prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class CompletionOut(Struct, frozen=True):
    """Also each event of a stream; `usage` is there only where it was asked for."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageOut | UnsetType | None = UNSET

"""POST /v1/chat/completions, in the form of OpenAI, with DeepSeek's `reasoning_content`."""

from typing import Annotated, Any, Literal

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


class ContentPart(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Only text is supported."""

    type: str
    text: str | None = None


class FunctionCall(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str


class ToolCall(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class Message(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Fields that OpenAI's answers carry besides are accepted and not used."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: None = None
    function_call: None = None


class ChatIn(Struct, frozen=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    model: str | None = None
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
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
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: PriorityName | None = None
    latency_class: LatencyName | None = None
    timeout_ms: TimeoutMs | None = None
    profile_id: ProfileId | None = None


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenEntry(Struct, frozen=True):
    """`bytes`: the token's own bytes, which need not be whole characters."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[TokenEntry]
    refusal: None = None


class ChatMessageOut(Struct, frozen=True):
    role: str
    content: str
    reasoning_content: str | UnsetType = UNSET
    refusal: None = None


class ChatChoice(Struct, frozen=True):
    index: int
    message: ChatMessageOut
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatOut(Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageOut


class ChatDelta(Struct, frozen=True):
    """A chunk has `content` or `reasoning_content`, never both."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(Struct, frozen=True):
    """One event of a stream; `usage` is there only where it was asked for."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageOut | UnsetType | None = UNSET

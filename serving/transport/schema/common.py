"""Shapes and field types that several endpoints share."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

MAX_TOP = 20  # most likely tokens that may be asked for, as in OpenAI's chat interface

TimeoutMs = Annotated[
    int, Meta(ge=1, le=86_400_000, description="Milliseconds from the request's arrival after which it ends with 504.")
]
ProfileId = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:@-]{0,127}$(?!\n)",
        description="A standing context: what prompts under this name start with is kept, and found again later.",
    ),
]
PriorityName = Literal["urgent", "normal", "low"]
LatencyName = Literal["score", "interactive", "batch"]
Temperature = Annotated[float, Meta(ge=0, le=2, description="0 is greedy; below 0.00001 counts as 0.")]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=2_147_483_647, description="Sample among the k most likely tokens; 0 or -1: all.")]
MinP = Annotated[float, Meta(ge=0, le=1)]
NumChoices = Annotated[int, Meta(ge=1, le=128)]
MaxTokens = Annotated[
    int, Meta(ge=0, le=2_147_483_647, description="Tokens to generate; clipped to what the context leaves.")
]
Seed = Annotated[int, Meta(description="Any 64-bit integer. Choice i samples with a seed derived from (seed, i).")]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
Stop = StopText | Annotated[list[StopText], Meta(max_length=16)]
StopTokenIds = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=64)]


Penalty = Annotated[float, Meta(ge=-2, le=2, description="As OpenAI's: of the tokens generated so far.")]
RepetitionPenalty = Annotated[
    float, Meta(gt=0, le=100, description="Of tokens in prompt or answer: their logits are divided by it. 1 is off.")
]
LogitBias = Annotated[
    dict[str, Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=300, description="Token id to what is added to its logit."),
]
AllowedTokenIds = Annotated[
    list[Annotated[int, Meta(ge=0)]],
    Meta(min_length=1, description="No other token is generated, the end token neither unless it is named."),
]
GuidedJson = Annotated[
    dict[str, Any] | str, Meta(description="The answer is JSON of this schema, which may be written as text.")
]
GuidedRegex = Annotated[
    str, Meta(description="The whole answer matches it. Rust's regex syntax: \\d is any digit of Unicode.")
]
GuidedChoice = Annotated[list[str], Meta(min_length=1, max_length=1024, description="The answer is one of these.")]


class JsonSchema(Struct, frozen=True, forbid_unknown_fields=True):
    """`name`, `description` and `strict` change nothing: a schema is always followed."""

    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ErrorOut(Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(Struct, frozen=True):
    """What every answer of status 400 and above holds, and the last event of a stream that failed."""

    error: ErrorOut


class UsageOut(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | UnsetType = UNSET


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # accepted: no obfuscation is ever sent

"""Plain data that crosses layers: what a client asked for, what the engine is given, what comes back.

Everything is frozen and holds no arrays, so any thread may keep a reference. A Request becomes Prepared sequences
(one per engine row), the engine answers each with Updates, and the pipeline folds those into Scores or Deltas. What is
made per row or token is a msgspec Struct, which costs a fifth of a dataclass to make.
Invariant: every sequence ends in exactly one Update whose `finish` or `error` is set.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, Protocol

from msgspec import Struct, field


class Priority(IntEnum):
    """Smaller runs first."""

    URGENT = 0
    NORMAL = 1
    LOW = 2


class LatencyClass(StrEnum):
    SCORE = "score"  # a label, end to end
    INTERACTIVE = "interactive"  # time to first token and per token
    BATCH = "batch"  # no target


class Tier(StrEnum):
    FULL = "full"
    INT8 = "int8"
    RULES = "rules"


class Finish(StrEnum):
    STOP = "stop"  # an end-of-sequence token, a stop string, or a constraint that is fulfilled
    LENGTH = "length"  # max_tokens or the context is used up
    SCORED = "scored"  # a sequence without generation has its log-probabilities


class TextInput(Struct, frozen=True):
    text: str


class TokenInput(Struct, frozen=True):
    token_ids: tuple[int, ...]


class ChatInput(Struct, frozen=True):
    messages: tuple[Mapping[str, Any], ...]


class FeatureInput(Struct, frozen=True):
    features: Mapping[str, Any]
    template: str | None = None


Input = TextInput | TokenInput | ChatInput | FeatureInput


class Constraint(Protocol):
    """What a row's text must be, token by token: one of its own for every row, used by one thread at a time."""

    @property
    def mask(self) -> bytes | None:
        """The tokens that may come next, token i as bit i % 8 of byte i // 8, in whole 4-byte words; None: the text is
        complete."""
        ...

    def push(self, token_id: int) -> None:
        """Take a token that `mask` allows, and find the next mask. Takes its time; raises where it cannot go on."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue a prompt. temperature 0 is greedy; top_k 0, top_p 1 and penalties 0 (repetition: 1) are off."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # 64 bits, already resolved: never None, one per choice
    stop_token_ids: tuple[int, ...] = ()
    top_logprobs: int = -1  # -1: none; 0: the chosen token's only; n: the n most likely too
    repetition_penalty: float = 1.0  # of tokens in prompt or output
    presence_penalty: float = 0.0  # of generated tokens
    frequency_penalty: float = 0.0  # of generated tokens, each time
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    constraint: Constraint | None = None

    @property
    def adjusts(self) -> bool:
        """The logits are changed before a token is drawn."""
        off = (1.0, 0.0, 0.0, (), None, None)
        return off != (
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
            self.logit_bias,
            self.allowed_token_ids,
            self.constraint,
        )


class Prepared(Struct, frozen=True):
    """One row for the engine: a prompt, and what is wanted of it.

    `sampling` None: score only. `targets`: token ids whose log-probability right after the prompt is wanted.
    `prompt_logprobs` >= 0: the log-probability of every prompt token given those before it, and that many alternatives.
    """

    token_ids: tuple[int, ...]
    sampling: SamplingParams | None = None
    targets: tuple[int, ...] = ()
    prompt_logprobs: int = -1


@dataclass(frozen=True, slots=True)
class Job:
    """Rows that were asked for together: cancelled together, admitted together."""

    id: str
    tenant: str
    rows: tuple[Prepared, ...]
    priority: Priority = Priority.NORMAL
    latency_class: LatencyClass = LatencyClass.INTERACTIVE
    deadline_s: float | None = None  # on the engine's clock; None: no deadline
    profile_id: str | None = None


class TokenLogprob(Struct, frozen=True):
    token_id: int
    logprob: float  # NaN: undefined, as for the first token of a prompt
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), most likely first


class Update(Struct, frozen=True):
    """News of one row. The last one of a row has `finish` or `error` set."""

    row: int
    tokens: tuple[TokenLogprob, ...] = ()  # newly generated
    target_logprobs: tuple[float, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # one per prompt token from the second on
    num_cached: int = 0  # prompt tokens whose prefill the prefix cache saved; told once, with the first news
    finish: Finish | None = None
    error: Exception | None = None  # a serving.errors.ServingError


class ProfileInfo(Struct, frozen=True):
    """A standing context that the engine keeps. `places`: where all of it is, beside the device: memory, disk."""

    id: str
    num_tokens: int
    num_bytes: int
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Score(Struct, frozen=True):
    """One input's answer; `error` set means that this input failed alone."""

    index: int
    label: str | None = None
    probabilities: Mapping[str, float] = field(default_factory=dict)
    tier: Tier = Tier.FULL
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of one choice of a completion."""

    choice: int
    text: str = ""
    reasoning: str = ""
    tokens: tuple[TokenLogprob, ...] = ()  # only when log-probabilities were asked for
    offsets: tuple[int, ...] = ()  # where each token's text starts, in characters of the choice's text
    finish: Finish | None = None
    error: Exception | None = None

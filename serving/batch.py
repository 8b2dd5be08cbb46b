"""The border between the engine's Python and the device: one Batch in, one StepOutput out, in NumPy.

A Batch always has every field, in the shape that its bucket fixes: what a request does not use is a zero-valued
no-op of the same shape, so one compiled program serves every feature. Row r is padding where length[r] == 0; page 0
and slot 0 belong to nobody and take the writes of padding. JAX arrays never cross this border.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

NUM_TARGETS = 16  # token ids scored at the last position of a row
NUM_TOP = 20  # most likely tokens reported per position
PAGES_AT_ONCE = 8  # KV pages that one read or write moves at most


class Kind(StrEnum):
    SCORE = "score"  # a whole prompt, no KV cache: label scoring and prompt log-probabilities
    EXTEND = "extend"  # a chunk of a prompt, into the paged KV cache; samples after its last token
    DECODE = "decode"  # one token a row, the one that the device sampled last in this row's slot
    SPECULATE = "speculate"  # the same and, behind it, the device's draft of the next one: one token more or two


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """One compiled shape. `tokens` is per row (1 for decode, 2 for speculate); `pages` is the width of the page table
    (0 for score)."""

    kind: Kind
    rows: int
    tokens: int
    pages: int


@dataclass(frozen=True, slots=True)
class Batch:
    bucket: Bucket
    tokens: NDArray[np.int32]  # [rows, tokens]; ignored in decode and speculate
    start: NDArray[np.int32]  # [rows] position of the row's first token; at most, where the device speculates
    length: NDArray[np.int32]  # [rows] valid tokens of the row in this step; 0: padding; speculate: 2, 1: no draft
    next_token: NDArray[np.int32]  # [rows] the prompt token that follows this chunk; 0 after the last one
    page_table: NDArray[np.int32]  # [rows, pages] pages in order of position; 0 beyond the row's own
    slot: NDArray[np.int32]  # [rows] where the sampled token is kept for the next decode; 0: nowhere
    targets: NDArray[np.int32]  # [rows, NUM_TARGETS]
    temperature: NDArray[np.float32]  # [rows] 0: greedy
    top_k: NDArray[np.int32]  # [rows] 0: off
    top_p: NDArray[np.float32]  # [rows] 1: off
    min_p: NDArray[np.float32]  # [rows] 0: off
    seed: NDArray[np.uint32]  # [rows, 2] the two halves of a 64-bit seed
    table: NDArray[np.int32]  # [rows] the slot, where the row's tables change what this step samples; else 0
    repetition_penalty: NDArray[np.float32]  # [rows] 1: off
    presence_penalty: NDArray[np.float32]  # [rows] 0: off
    frequency_penalty: NDArray[np.float32]  # [rows] 0: off
    want_top: NDArray[np.bool_]  # [] any row wants the most likely tokens after its last position
    want_prompt: NDArray[np.bool_]  # [] any row wants log-probabilities inside its prompt
    # Written before the step, in this order; () nearly always.
    set_tables: tuple["SlotTable", ...] = ()
    set_masks: tuple["SlotMask", ...] = ()


@dataclass(frozen=True, slots=True)
class SlotTable:
    """All that a slot's tables say about its row, when the row samples in this slot for the first time.

    Token ids are below the model's vocabulary. What the slot's last owner left is replaced. Tokens that a step samples
    are counted on the device from then on.
    """

    slot: int
    prompt: NDArray[np.int32]  # [n] the row's prompt as it was asked for
    generated: NDArray[np.int32]  # [m] generated before: a row that is resumed
    bias: tuple[tuple[int, float], ...]  # added to a token's logit
    allowed: tuple[int, ...] | None  # None: every token


@dataclass(frozen=True, slots=True)
class SlotMask:
    """The tokens that a slot's row may draw from now on. Bit i % 32 of word i / 32: token i."""

    slot: int
    words: NDArray[np.uint32]  # [ceil(vocabulary / 32)]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Host copies. Arrays that the batch did not ask for (want_top, want_prompt) are None, never fetched.

    A speculative step has twice the bucket's rows here: row r follows the last token, row bucket.rows + r the draft.
    """

    token: NDArray[np.int32]  # [rows] sampled after the last valid token
    logprob: NDArray[np.float32]  # [rows] its log-probability (before temperature and truncation)
    target_logprobs: NDArray[np.float32]  # [rows, NUM_TARGETS]
    finite: NDArray[np.bool_]  # [rows] False: this row's logits hold NaN or +inf
    top_ids: NDArray[np.int32] | None  # [rows, NUM_TOP]
    top_logprobs: NDArray[np.float32] | None  # [rows, NUM_TOP]
    prompt_logprobs: (
        NDArray[np.float32] | None
    )  # [rows, tokens]; [r, i]: of token i+1 of the chunk, given those up to i; [r, length-1]: of next_token
    prompt_top_ids: NDArray[np.int32] | None  # [rows, tokens, NUM_TOP]
    prompt_top_logprobs: NDArray[np.float32] | None  # [rows, tokens, NUM_TOP]
    drafted: NDArray[np.bool_] | None = None  # [2 rows] of a speculative step: row r had a draft
    accepted: NDArray[np.bool_] | None = None  # [2 rows] it was token[r]: token[bucket.rows + r] counts too


class Pending(Protocol):
    """A dispatched step."""

    def done(self) -> bool:
        """Whether `result` would not have to wait."""
        ...

    def result(self) -> StepOutput:
        """Wait for the device; raise what the step raised."""
        ...


class PendingPages(Protocol):
    """Dispatched reads of KV pages."""

    def done(self) -> bool:
        """Whether `result` would not have to wait."""
        ...

    def result(self) -> NDArray[np.uint8]:
        """[pages, page_bytes], in the order asked for. Waits; raises what the device raised."""
        ...


class StepTimes(NamedTuple):
    """Seconds of a step as a rule, of EXTEND with nothing before its tokens; and with `prefix` before them (0: not
    tried)."""

    alone_s: float
    far_s: float = 0.0
    prefix: int = 0


class Runner(Protocol):
    """Runs batches in the order of submission. Not thread-safe: the engine thread owns it."""

    @property
    def buckets(self) -> Sequence[Bucket]: ...

    @property
    def num_pages(self) -> int:
        """Pages of the KV cache, the reserved page 0 included."""
        ...

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        ...

    @property
    def page_copy_s(self) -> float:
        """Seconds that a write of one page took in the warm-up, from host memory; 0 before it."""
        ...

    @property
    def step_s(self) -> Mapping[Bucket, StepTimes]:
        """What steps with a KV cache took in the warm-up; empty before it."""
        ...

    def warmup(self, progress: "Progress") -> None:
        """Compile every bucket; after it returns no submit compiles."""
        ...

    def submit(self, batch: Batch) -> Pending:
        """Write what the batch sets, then dispatch the step, without waiting for either."""
        ...

    def read_pages(self, pages: Sequence[int]) -> PendingPages:
        """Up to PAGES_AT_ONCE pages as they are after the steps dispatched so far; they may be reused at once."""
        ...

    def write_pages(self, pages: Sequence[int], content: NDArray[np.uint8]) -> None:
        """Up to PAGES_AT_ONCE pages get `content` [pages, page_bytes] before the steps dispatched from now on."""
        ...

    def reset(self) -> None:
        """Give the KV cache and the slots fresh storage after a failed step."""
        ...

    def close(self) -> None: ...


class Progress(Protocol):
    def __call__(self, done: int, total: int) -> None: ...

"""One row inside the engine: what it is for, how far it has come, what it holds.

Counters run ahead of results, because a step is dispatched before the last one's tokens are read: `prefilled` and
`planned` count what has been dispatched (at most: a draft that turns out wrong is taken back), `generated` what has
been read. A row that is stopped to make room starts again with what it has generated as part of its prompt; `run`
counts its starts, and results of an earlier one are not taken. Owned by the engine thread. Invariant:
0 <= generated <= planned <= max_new, and a sequence that waits or is done holds neither pages nor slot.
"""

from enum import Enum
from itertools import chain

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from serving.batch import NUM_TARGETS, NUM_TOP
from serving.errors import BadRequest
from serving.types import Constraint, Job, Prepared, Priority, SamplingParams, TokenLogprob

from .page_keys import next_key, root_key

_INT32 = range(-(2**31), 2**31)
_NO_STOPS: frozenset[int] = frozenset()


class Stage(Enum):
    WAITING = 0  # in a queue; holds nothing
    SCORING = 1  # its only step is dispatched
    PREFILL = 2  # has pages and a slot; part of the prompt is yet to be dispatched
    DECODE = 3  # the whole prompt is dispatched
    DONE = 4  # its last update is out


class Sequence(Struct, eq=False):
    """`owner` is the engine's handle for whoever asked; the scheduler never looks into it."""

    owner: object
    row: int
    tenant: str
    prompt: NDArray[np.int32]  # [num_prompt] what has to go through the model before the next token can be generated
    num_prompt: int
    num_asked: int  # tokens of `prompt` that the request brought; the others were generated before the row was stopped
    sampling: SamplingParams | None
    targets: tuple[int, ...]
    prompt_logprobs: int
    priority: Priority
    deadline_s: float | None
    max_new: int  # tokens to generate; 0: score only
    stops: frozenset[int]
    constraint: Constraint | None
    mask: NDArray[np.uint32] | None  # of the token after `output`; None while its constraint looks for it
    profile: str | None = None  # that its prompt is to be kept as, see `profiles`; None once it has been
    arrived_s: float = 0.0
    order: int = 0  # of arrival; no two rows have the same
    turn: float = 0.0  # see `waiting`
    rank: tuple[float, int] = (0.0, 0)  # arrival aged by priority, order: the smallest first, the largest makes room
    started: bool = False
    queued_s: float = 0.0  # when it last began to wait
    waited_s: float = 0.0  # in all, up to its last start
    stage: Stage = Stage.WAITING
    run: int = 0
    slot: int = 0  # 0: none
    pages: list[int] = []  # in order of position
    keys: list[bytes] = []  # of the whole pages of prompt and output, see `page_keys`
    turns: bool = False  # its pages are used more than once, see `ring`: it has no keys
    num_registered: int = 0  # of those pages, in the prefix cache
    prefilled: int = 0
    planned: int = 0
    output: list[int] = []  # tokens generated and read
    num_shared: int = 0  # tokens of this run's prompt that came from the prefix cache
    num_cached: int = 0  # the same of the first run: what the request is told
    prompt_entries: list[TokenLogprob] = []

    def __repr__(self) -> str:
        """Without the prompt, which would get into logs."""
        return f"Sequence(row {self.row}, {self.stage.name})"

    @property
    def generated(self) -> int:
        return len(self.output)

    @property
    def may_sample(self) -> bool:
        """All but a constrained row whose next mask is not known, or whose last token has not been read."""
        return self.constraint is None or (self.mask is not None and self.planned == self.generated)

    def next_chunk(self, most: int) -> int:
        """Positions that its next generating step feeds, of `most`: its last token, and drafts that it has a use for.
        A constraint must see each token before the next one."""
        return 1 if self.constraint is not None else min(most, self.max_new - self.planned)

    @property
    def cost(self) -> int:
        """Tokens that the row may put through the model."""
        return self.num_asked + self.max_new

    @property
    def aged_from_s(self) -> float:
        """When it would have come if it had always waited: what ageing counts from."""
        return self.queued_s - self.waited_s

    @property
    def num_kv(self) -> int:
        """Tokens that the KV cache holds at most: the last generated one is never fed back."""
        return self.num_asked + max(0, self.max_new - 1)

    @property
    def top(self) -> int:
        """Alternatives wanted beside each generated token; 0: none."""
        return 0 if self.sampling is None else max(0, self.sampling.top_logprobs)

    @property
    def wants_prompt(self) -> bool:
        """Log-probabilities inside the prompt are still to be given."""
        return self.prompt_logprobs >= 0 and not self.output

    @property
    def may_reuse(self) -> bool:
        """Its prompt may start with cached pages; log-probabilities inside the prompt need every token computed."""
        return not self.wants_prompt

    def tokens(self, start: int, stop: int) -> NDArray[np.int32]:
        """[stop - start] prompt and output, at these positions."""
        if stop <= self.num_prompt:
            return self.prompt[start:stop]
        output = self.output[max(0, start - self.num_asked) : stop - self.num_asked]
        return np.concatenate([self.prompt[start : self.num_asked], np.array(output, np.int32)])

    def add_key(self, tokens: NDArray[np.int32]) -> None:
        """The key of the next whole page, which holds `tokens`."""
        self.keys.append(next_key(self.keys[-1] if self.keys else root_key(self.tenant), tokens))

    def rewind(self) -> None:
        """Back to waiting, with what was generated as part of the prompt."""
        if self.num_prompt < self.num_asked + self.generated:
            grown = np.array(self.output[self.num_prompt - self.num_asked :], np.int32)
            self.prompt = np.concatenate([self.prompt, grown])
            self.num_prompt = len(self.prompt)
        self.stage, self.run, self.slot = Stage.WAITING, self.run + 1, 0
        self.pages, self.num_registered, self.prefilled, self.num_shared = [], 0, 0, 0
        self.planned = self.generated
        self.prompt_entries.clear()


def make_sequences(owner: object, job: Job) -> tuple[Sequence, ...]:
    """One sequence a row of `job`. BadRequest names the row whose numbers no step could carry: found here, on the
    caller's thread, they end a request; found while a step is formed they would end the engine."""
    for index, row in enumerate(job.rows):
        _check(index, row)
    return tuple([_make(owner, job, *each) for each in zip(range(len(job.rows)), job.rows, _prompts(job), strict=True)])


def _make(owner: object, job: Job, index: int, row: Prepared, prompt: NDArray[np.int32]) -> Sequence:
    sampling = row.sampling
    constraint = None if sampling is None else sampling.constraint
    return Sequence(  # by position: a quarter of the time
        owner,
        index,
        job.tenant,
        prompt,
        len(prompt),
        len(prompt),
        sampling,
        row.targets,
        row.prompt_logprobs,
        job.priority,
        job.deadline_s,
        0 if sampling is None else sampling.max_tokens,
        _NO_STOPS if sampling is None else frozenset(sampling.stop_token_ids),
        constraint,
        None if constraint is None else _first_mask(index, constraint),
        job.profile_id,
    )


def _first_mask(index: int, constraint: Constraint) -> NDArray[np.uint32]:
    if constraint.mask is None:
        raise BadRequest(f"row {index} has a constraint that leaves no text")
    return np.frombuffer(constraint.mask, "<u4")


def _prompts(job: Job) -> list[NDArray[np.int32]]:
    """Each row's tokens: parts of one array, converted in one go; choices of one prompt share theirs."""
    own = {id(row.token_ids): row.token_ids for row in job.rows}
    try:
        tokens = np.fromiter(chain.from_iterable(own.values()), np.int32)
    except OverflowError:
        index = next(i for i, row in enumerate(job.rows) if not _are_int32(row.token_ids))
        raise BadRequest(f"row {index} has a token id that is no 32-bit number") from None
    parts, start = {}, 0
    for key, ids in own.items():
        parts[key] = tokens[start : start + len(ids)]
        start += len(ids)
    return [parts[id(row.token_ids)] for row in job.rows]


def _are_int32(numbers: tuple[int, ...]) -> bool:
    return min(numbers) in _INT32 and max(numbers) in _INT32


def _check(index: int, row: Prepared) -> None:
    if not row.token_ids:
        raise BadRequest(f"row {index} has no tokens; a prompt has one at least")
    if len(row.targets) > NUM_TARGETS:
        raise BadRequest(f"row {index} asks for {len(row.targets)} target tokens; {NUM_TARGETS} is the most")
    asked = row.prompt_logprobs if row.sampling is None else max(row.prompt_logprobs, row.sampling.top_logprobs)
    if asked > NUM_TOP:
        raise BadRequest(f"row {index} asks for {asked} alternatives a token; {NUM_TOP} is the most")
    if row.targets and not _are_int32(row.targets):
        raise BadRequest(f"row {index} has a target token that is no 32-bit number")
    if row.sampling is not None:
        _check_sampling(index, row.sampling)


def _check_sampling(index: int, sampling: SamplingParams) -> None:
    if sampling.max_tokens < 0:
        raise BadRequest(f"row {index} asks for {sampling.max_tokens} tokens; 0 is the least")
    if sampling.top_k not in _INT32:
        raise BadRequest(f"row {index} has top_k {sampling.top_k}; {_INT32[-1]} is the most")

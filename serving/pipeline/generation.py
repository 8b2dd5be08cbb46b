"""The stages of completions around the engine: `prepare_generation` (render, encode, rows) and one Choice per row.

Policies, the same for every endpoint: the prompt alone must leave room for a token (else context_length_exceeded);
max_tokens is clipped to what the context leaves; choice i of a request samples with a seed derived from (seed, i).
Choice p * n + i is choice i of prompt p, and is row p * n + i of the engine's job.
"""

import math
from dataclasses import dataclass, field

from serving.errors import ContextLengthExceeded, ServingError
from serving.types import Constraint, Delta, Input, Prepared, SamplingParams, TokenLogprob, Update

from .choice import Choice
from .guide import Grammar
from .language import Language
from .prompts import Prompt, encode_inputs
from .seeds import choice_seed
from .steering import check_ids, constraint_maker, no_tables, row_constraint
from .stops import StopMatcher


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What a client asks for. `max_tokens` None: all that the context leaves."""

    prompts: tuple[Input, ...]
    num_choices: int = 1
    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    seed_is_fresh: bool = False  # the client gave none: then equal prompts of one request must not draw alike
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = -1  # -1: none; n: the chosen token's and the n most likely
    echo: bool = False
    split_reasoning: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """rows[i] is answered by choices[i]."""

    rows: tuple[Prepared, ...]
    choices: tuple["EchoedChoice | Choice", ...]
    num_prompt_tokens: int
    num_rows_per_prompt: int = 1

    @property
    def num_completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)


@dataclass(slots=True)
class EchoedChoice:
    """A choice that gives the prompt back first: its text at once, or token by token with log-probabilities."""

    index: int
    prompt: Prompt
    text: str
    offsets: tuple[int, ...]
    inner: Choice
    with_logprobs: bool
    _tokens: list[TokenLogprob] = field(default_factory=list)
    _echoed: bool = False

    @property
    def num_tokens(self) -> int:
        return self.inner.num_tokens

    @property
    def ended(self) -> bool:
        return self.inner.ended

    @property
    def cut(self) -> bool:
        return self.inner.cut

    def push(self, update: Update) -> list[Delta]:
        """The echo comes once all of the prompt's log-probabilities are there, before anything generated."""
        self._tokens.extend(update.prompt_logprobs)
        deltas = self._echo() if update.error is None and self._complete() else []
        if update.tokens or update.finish is not None or update.error is not None:
            deltas += self.inner.push(update)
        return deltas

    def _complete(self) -> bool:
        return not self._echoed and (not self.with_logprobs or len(self._tokens) >= len(self.prompt) - 1)

    def _echo(self) -> list[Delta]:
        self._echoed = True
        if not self.with_logprobs:
            return [Delta(self.index, text=self.text)]
        first = TokenLogprob(self.prompt[0], math.nan)
        return [Delta(self.index, text=self.text, tokens=(first, *self._tokens), offsets=self.offsets)]


def prepare_generation(language: Language, request: GenerationRequest) -> GenerationPlan:
    """Rows for the engine and the choices that take its updates. Raises ServingError: one bad prompt fails all."""
    check_ids(language, logit_bias=request.logit_bias, allowed=request.allowed_token_ids)
    make = constraint_maker(language, request.grammar)
    prompts = [_usable(prompt) for prompt in encode_inputs(language, request.prompts)]
    rows: list[Prepared] = []
    choices: list[EchoedChoice | Choice] = []
    for prompt in prompts:
        max_tokens = _clipped(language, prompt, request.max_tokens)
        for choice in range(request.num_choices):
            draw = len(choices) if request.seed_is_fresh else choice
            constraint = row_constraint(language, make, prompt if request.split_reasoning else ())
            rows.append(_row(language, request, prompt, draw, max_tokens, constraint))
            choices.append(_choice(language, request, prompt, len(choices)))
    num_tokens = sum(len(prompt) for prompt in prompts)
    return GenerationPlan(tuple(rows), tuple(choices), num_tokens, request.num_choices)


def _usable(prompt: Prompt | ServingError) -> Prompt:
    if isinstance(prompt, ServingError):
        raise prompt
    return prompt


def _clipped(language: Language, prompt: Prompt, max_tokens: int | None) -> int:
    room = language.max_context - len(prompt)
    if room < 1 and max_tokens != 0:
        raise ContextLengthExceeded(
            f"this model's context is {language.max_context} tokens and must hold the answer too; "
            f"the prompt has {len(prompt)}"
        )
    return room if max_tokens is None else min(max_tokens, room)


def _stop_ids(language: Language, request: GenerationRequest) -> tuple[int, ...]:
    eos = () if request.ignore_eos else language.tokenizer.eos_ids
    return tuple(dict.fromkeys((*eos, *request.stop_token_ids)))


def _row(
    language: Language,
    request: GenerationRequest,
    prompt: Prompt,
    draw: int,
    max_tokens: int,
    constraint: Constraint | None,
) -> Prepared:
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        seed=choice_seed(request.seed, draw),
        stop_token_ids=_stop_ids(language, request),
        top_logprobs=request.logprobs,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=request.logit_bias,
        allowed_token_ids=request.allowed_token_ids,
        constraint=constraint,
    )
    if sampling.adjusts and not language.adjusts:
        raise no_tables()
    return Prepared(prompt, sampling, prompt_logprobs=request.logprobs if request.echo else -1)


def _choice(language: Language, request: GenerationRequest, prompt: Prompt, index: int) -> EchoedChoice | Choice:
    echo, offsets = _echo_text(language, prompt) if request.echo else ("", ())
    new_splitter = language.new_splitter if request.split_reasoning else None
    choice = Choice(
        index,
        detokenizer=language.new_detokenizer(),
        stops=StopMatcher(request.stop),
        splitter=new_splitter(prompt) if new_splitter is not None else None,
        stop_token_ids=frozenset(_stop_ids(language, request)),
        with_logprobs=request.logprobs >= 0,
        offset=len(echo),
    )
    return EchoedChoice(index, prompt, echo, offsets, choice, request.logprobs >= 0) if request.echo else choice


def _echo_text(language: Language, prompt: Prompt) -> tuple[str, tuple[int, ...]]:
    """The prompt's text and the offset of each of its tokens."""
    detokenizer = language.new_detokenizer()
    text, offsets = "", []
    for token in prompt:
        offsets.append(len(text))
        text += detokenizer.push((token,))
    return text + detokenizer.flush(), tuple(offsets)

"""The device steps of serving, as pure functions: score, extend, decode; `speculate` has the fourth.

Each takes a model, what it keeps on the device (cache pools and the last sampled token of every slot) and the arrays of
one batch, and returns the new device state and the outputs. The runner compiles them once per bucket; `check` runs the
same functions. Every array is always present: what a row does not use is a no-op of the same shape, and work that no
row asked for (most likely tokens, log-probabilities inside the prompt) is skipped by a branch, not by another program.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .adjust import Adjust, Tables, adjusted, count
from .cache import PageView, Pool
from .drafts import Drafts, Newest, draft_next
from .sampling import Sampling, sample
from .transformer import Transformer

LOGIT_ROWS = 64  # positions whose logits exist at once while a prompt is scored


class StepInput(NamedTuple):
    """serving.batch.Batch on the device; the meaning of each field is written there."""

    tokens: Int[Array, "b t"]
    next_token: Int[Array, " b"]
    start: Int[Array, " b"]
    length: Int[Array, " b"]
    page_table: Int[Array, "b pages"]
    slot: Int[Array, " b"]
    targets: Int[Array, "b n"]
    sampling: Sampling
    want_top: Bool[Array, ""]
    want_prompt: Bool[Array, ""]
    adjust: Adjust | None = None  # None where the state has no tables


class DeviceState(NamedTuple):
    """What stays on the device between steps; donated to each step and returned from it.

    `tables` None: this server adjusts no logits; `drafts` None: it does not speculate, else the last pool is the MTP
    layer's. The same for all steps of a state.
    """

    pools: tuple[Pool, ...]
    last_token: Int[Array, " slots"]  # the token sampled last in each slot; slot 0 takes the writes of padding
    tables: Tables | None = None
    drafts: Drafts | None = None


class StepOutputs(NamedTuple):
    """serving.batch.StepOutput on the device. `drafted`, `accepted`: of a speculative step alone."""

    token: Int[Array, " b"]
    logprob: Float[Array, " b"]
    target_logprobs: Float[Array, "b n"]
    finite: Bool[Array, " b"]
    top_ids: Int[Array, "b k"]
    top_logprobs: Float[Array, "b k"]
    prompt_logprobs: Float[Array, "b t"]
    prompt_top_ids: Int[Array, "b t k"]
    prompt_top_logprobs: Float[Array, "b t k"]
    drafted: Bool[Array, " b"] | None = None
    accepted: Bool[Array, " b"] | None = None


class PromptLogprobs(NamedTuple):
    """Of the token after each position of a chunk, and of the most likely ones there."""

    chosen: Float[Array, "b t"]
    top: Float[Array, "b t k"]
    top_ids: Int[Array, "b t k"]

    @classmethod
    def none(cls, rows: int, tokens: int, num_top: int) -> "PromptLogprobs":
        shape = (rows, tokens)
        return cls(jnp.zeros(shape), jnp.zeros((*shape, num_top)), jnp.zeros((*shape, num_top), jnp.int32))


def score_step(model: Transformer, batch: StepInput, *, num_top: int) -> StepOutputs:
    """Whole prompts without a cache: row r is tokens[r, :length[r]], at positions from 0."""
    hidden = model.hidden(batch.tokens, _positions(batch), batch.length)
    return _outputs(model, hidden, batch, num_top)


def extend_step(
    model: Transformer, state: DeviceState, batch: StepInput, *, num_top: int
) -> tuple[DeviceState, StepOutputs]:
    """One chunk of each prompt into the cache; samples after its last token into the row's slot."""
    return _cached_step(model, state, batch, num_top, chunks=True)


def decode_step(
    model: Transformer, state: DeviceState, batch: StepInput, *, num_top: int
) -> tuple[DeviceState, StepOutputs]:
    """One token of each row: the one sampled last in its slot, at position start[r], or where the device has it.

    Leaves no draft: that would cost a layer and the head.
    """
    tokens, start = state.last_token[batch.slot][:, None], batch.start
    if state.drafts is not None:
        start, _ = state.drafts.at(batch.slot, batch.length > 0)
    return _cached_step(model, state, batch._replace(tokens=tokens, start=start), num_top, chunks=False)


def _cached_step(
    model: Transformer, state: DeviceState, batch: StepInput, num_top: int, *, chunks: bool
) -> tuple[DeviceState, StepOutputs]:
    """`chunks`: of prompts, so not all rows end in a token; and where the state has drafts, make one."""
    view = PageView(batch.page_table, _positions(batch), batch.length)
    hidden, pools = model.hidden_paged(batch.tokens, view, state.pools[: len(model.layers)])
    ends = (batch.next_token == 0) & (batch.length > 0) if chunks else None
    out = _outputs(model, hidden, batch, num_top, state.tables, ends)
    tables = state.tables
    if tables is not None and batch.adjust is not None:
        tables = count(tables, batch.adjust, out.token)
    new = DeviceState(pools, state.last_token.at[batch.slot].set(out.token), tables)
    if state.drafts is None:
        return new, out
    following = _following(batch, jnp.where(batch.next_token > 0, batch.next_token, out.token))
    _, pool = model.mtp_paged(hidden, following, view, state.pools[-1])
    end, live, draft = batch.start + batch.length, batch.length > 0, jnp.full_like(out.token, -1)
    if chunks:
        last = jnp.take_along_axis(hidden, jnp.maximum(batch.length - 1, 0)[:, None, None], axis=1)
        newest = Newest(last, out.token, jnp.maximum(end, 1), batch.page_table, live)
        draft, pool = draft_next(model, newest, pool, batch.sampling, batch.adjust, tables)
    return new._replace(pools=(*pools, pool), drafts=state.drafts.put(batch.slot, live, end, draft)), out


def _positions(batch: StepInput) -> Int[Array, "b t"]:
    return batch.start[:, None] + jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[None, :]


def _outputs(
    model: Transformer,
    hidden: Float[Array, "b t d"],
    batch: StepInput,
    num_top: int,
    tables: Tables | None = None,
    ends: Bool[Array, " b"] | None = None,
) -> StepOutputs:
    """`ends`: rows whose token somebody wants; None: all."""
    last = jnp.maximum(batch.length - 1, 0)
    newest = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    logits = model.logits(newest) if ends is None else _logits_if(ends.any(), model, newest)
    token = draw(model, logits, batch, batch.start + batch.length, tables)
    out = reported(model, logits, token, batch, _prompt_logprobs(model, hidden, batch, num_top), num_top)
    return out._replace(finite=out.finite & jnp.isfinite(newest).all(axis=-1))


def _logits_if(wanted: Bool[Array, ""], model: Transformer, hidden: Float[Array, "b d"]) -> Float[Array, "b v"]:
    """Or zeros: for one row the head takes as long as a fifth of a short chunk's layers."""
    like = jax.eval_shape(model.logits, hidden)
    out: Float[Array, "b v"] = jax.lax.cond(wanted, model.logits, lambda _: jnp.zeros(like.shape, like.dtype), hidden)
    return out


def reported(
    model: Transformer,
    logits: Float[Array, "b v"],
    token: Int[Array, " b"],
    batch: StepInput,
    prompt: PromptLogprobs,
    num_top: int,
) -> StepOutputs:
    """What a step tells of the tokens that were drawn from `logits`."""
    logprobs = model.arithmetic.rows(jax.nn.log_softmax, logits)
    top_logprobs, top_ids = _top_if(batch.want_top, logprobs, num_top)
    return StepOutputs(
        token=token,
        logprob=jnp.take_along_axis(logprobs, token[:, None], axis=1)[:, 0],
        target_logprobs=jnp.take_along_axis(logprobs, batch.targets, axis=1),
        finite=jnp.isfinite(logits).all(axis=-1),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt.chosen,
        prompt_top_ids=prompt.top_ids,
        prompt_top_logprobs=prompt.top,
    )


def draw(
    model: Transformer,
    logits: Float[Array, "b v"],
    batch: StepInput,
    positions: Int[Array, " b"],
    tables: Tables | None,
    also: Int[Array, " b"] | None = None,
) -> Int[Array, " b"]:
    """The token for these positions of the batch's rows: fixed by logits, seed, position and the row's tables.
    `also`: see `adjusted`."""

    def choose(
        raw: jax.Array, sampling: Sampling, positions: jax.Array, adjust: Adjust | None, also: jax.Array | None
    ) -> jax.Array:
        wanted = raw if tables is None or adjust is None else adjusted(raw, tables, adjust, also)
        return sample(wanted, sampling, positions)

    token: Int[Array, " b"] = model.arithmetic.rows(choose, logits, batch.sampling, positions, batch.adjust, also)
    return token


def _following(batch: StepInput, last: Int[Array, " b"]) -> Int[Array, "b t"]:
    """The token after each of the chunk's; `last`: after its last one."""
    following = jnp.concatenate([batch.tokens[:, 1:], last[:, None]], axis=1)
    at_end = jnp.arange(following.shape[1])[None, :] == batch.length[:, None] - 1
    return jnp.where(at_end, last[:, None], following)


def _top(logprobs: Float[Array, "n v"], num_top: int) -> tuple[Float[Array, "n k"], Int[Array, "n k"]]:
    """The most likely tokens; a vocabulary smaller than num_top is padded with -inf."""
    values, ids = jax.lax.top_k(logprobs, min(num_top, logprobs.shape[-1]))
    pad = ((0, 0), (0, num_top - values.shape[-1]))
    return jnp.pad(values, pad, constant_values=-jnp.inf), jnp.pad(ids, pad)


def _top_if(
    wanted: Bool[Array, ""], logprobs: Float[Array, "n v"], num_top: int
) -> tuple[Float[Array, "n k"], Int[Array, "n k"]]:
    """`_top`, or zeros where nobody wants it."""

    def nothing(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        shape = (rows.shape[0], num_top)
        return jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32)

    out: tuple[jax.Array, jax.Array] = jax.lax.cond(wanted, lambda rows: _top(rows, num_top), nothing, logprobs)
    return out


def _prompt_logprobs(
    model: Transformer, hidden: Float[Array, "b t d"], batch: StepInput, num_top: int
) -> PromptLogprobs:
    """Logits exist for LOGIT_ROWS positions at a time."""
    (b, t, d), rows = hidden.shape, LOGIT_ROWS
    following = _following(batch, batch.next_token)
    pad = -(b * t) % rows
    flat = jnp.pad(hidden.reshape(-1, d), ((0, pad), (0, 0))).reshape(-1, rows, d)
    wanted_ids = jnp.pad(following.reshape(-1), (0, pad)).reshape(-1, rows)

    def chunk(args: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        logprobs = model.arithmetic.rows(jax.nn.log_softmax, model.logits(args[0]))
        return jnp.take_along_axis(logprobs, args[1][:, None], axis=1)[:, 0], *_top(logprobs, num_top)

    def compute(h: jax.Array, ids: jax.Array) -> PromptLogprobs:
        chosen, values, top_ids = jax.lax.map(chunk, (h, ids))
        count = b * t
        return PromptLogprobs(
            chosen.reshape(-1)[:count].reshape(b, t),
            values.reshape(-1, num_top)[:count].reshape(b, t, num_top),
            top_ids.reshape(-1, num_top)[:count].reshape(b, t, num_top),
        )

    def skip(*_: jax.Array) -> PromptLogprobs:
        return PromptLogprobs.none(b, t, num_top)

    out: PromptLogprobs = jax.lax.cond(batch.want_prompt, compute, skip, flat, wanted_ids)
    return out

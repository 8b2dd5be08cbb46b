"""Speculative decoding with the MTP layer (arXiv:2412.19437 section 2.2), as one device step like those of `steps`.

A row is fed its last token and a draft of the next one in one pass. The token after the first is drawn as in a plain
decode step; where it is the draft, the token after the second is drawn too and both count. Then the MTP layer guesses
the token after the newest one: the draft of the row's next step. What a position's token is depends on its logits, the
seed and the position alone, so that accepting exactly the draft that was drawn gives what plain decoding gives, greedy
or sampled, token by token (to the rounding of logits, which differs between shapes), not only in distribution as with
the rule of Leviathan et al. (arXiv:2211.17192). The draft is drawn from the MTP layer's logits with the noise of the
position that it is for: such pairs agree most of the time that the distributions do (arXiv:2408.07978).

The other steps only write the MTP layer's cache, which costs its key and value projections, and leave no draft: the
first speculative step after them gives one token. The cache holds of a position what the token after it made of it; at
the end of a page that another prompt shares this may be another token. A guess suffers by that, never an answer.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .adjust import Tables, count
from .cache import PageView
from .steps import DeviceState, Drafts, StepInput, StepOutputs, draw, top_if
from .transformer import Transformer

AHEAD = 2  # tokens fed: the last one and its draft


def speculate_step(
    model: Transformer, state: DeviceState, batch: StepInput, *, num_top: int
) -> tuple[DeviceState, StepOutputs]:
    """One or two tokens of each row. length[r] is 2, or 1 where the row's draft is not to be used.

    The outputs have 2 b rows: r is what follows the last token, b + r what follows the draft and counts where
    `accepted[r]`. `start` and `tokens` of the batch are not read: the device knows better.
    """
    assert state.drafts is not None, "a state without drafts"
    live, start = batch.length > 0, jnp.where(batch.length > 0, state.drafts.position[batch.slot], 0)
    draft = state.drafts.token[batch.slot]
    tokens = jnp.stack([state.last_token[batch.slot], jnp.maximum(draft, 0)], axis=1)
    view = PageView(batch.page_table, start[:, None] + jnp.arange(AHEAD, dtype=jnp.int32), batch.length)
    hidden, pools = model.hidden_paged(tokens, view, state.pools[:-1])
    logits = model.logits(hidden.swapaxes(0, 1))  # [2, b, v]

    first = draw(model, logits[0], batch, start + 1, state.tables)
    drafted = (batch.length == AHEAD) & (draft >= 0)
    accepted = drafted & (first == draft)
    tables = _counted(state.tables, batch, first)
    second = draw(model, logits[1], batch, start + 2, tables)
    tables = _counted(tables, batch, second, accepted)

    x, pool = model.mtp_paged(hidden, jnp.stack([first, second], axis=1), view, state.pools[-1])
    end = start + 1 + accepted  # where the newest token is
    newest = jnp.take_along_axis(x, accepted.astype(jnp.int32)[:, None, None], axis=1)[:, 0]
    guess = draw(model, model.logits(newest), batch, end + 1, tables)

    drafts = Drafts(
        state.drafts.position.at[batch.slot].set(jnp.where(live, end, 0)),
        state.drafts.token.at[batch.slot].set(jnp.where(live, guess, -1)),
    )
    last_token = state.last_token.at[batch.slot].set(jnp.where(accepted, second, first))
    out = _outputs(logits.reshape(-1, logits.shape[-1]), jnp.concatenate([first, second]), batch, num_top)
    never = jnp.zeros_like(accepted)
    out = out._replace(drafted=jnp.concatenate([drafted, never]), accepted=jnp.concatenate([accepted, never]))
    return DeviceState((*pools, pool), last_token, tables, drafts), out


def _counted(
    tables: Tables | None, batch: StepInput, token: Int[Array, " b"], which: Array | None = None
) -> Tables | None:
    """`which` [b]: rows whose token counts; None: all."""
    if tables is None or batch.adjust is None:
        return tables
    adjust = batch.adjust
    return count(tables, adjust if which is None else adjust._replace(table=jnp.where(which, adjust.table, 0)), token)


def _outputs(logits: Float[Array, "n v"], token: Int[Array, " n"], batch: StepInput, num_top: int) -> StepOutputs:
    logprobs = jax.nn.log_softmax(logits)
    top_logprobs, top_ids = top_if(batch.want_top, logprobs, num_top)
    n = len(token)
    return StepOutputs(
        token=token,
        logprob=jnp.take_along_axis(logprobs, token[:, None], axis=1)[:, 0],
        target_logprobs=jnp.take_along_axis(logprobs, jnp.tile(batch.targets, (AHEAD, 1)), axis=1),
        finite=jnp.isfinite(logits).all(axis=-1),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        prompt_logprobs=jnp.zeros((n, AHEAD)),
        prompt_top_ids=jnp.zeros((n, AHEAD, num_top), jnp.int32),
        prompt_top_logprobs=jnp.zeros((n, AHEAD, num_top)),
    )

"""Speculative decoding with the MTP layer (arXiv:2412.19437 section 2.2), as one device step like those of `steps`.

A row is fed its last token and a draft of the next one in one pass. The token after the first is drawn as in a plain
decode step; where it is the draft, the token after the second is drawn too and both count. Then the MTP layer guesses
the token after the newest one: the draft of the row's next step. What a position's token is depends on its logits, the
seed and the position alone, so that accepting exactly the draft that was drawn gives what plain decoding gives, greedy
or sampled, token by token (to the rounding of logits, which differs between shapes), not only in distribution as with
the rule of Leviathan et al. (arXiv:2211.17192). The draft is drawn from the MTP layer's logits with the noise of the
position that it is for: such pairs agree most of the time that the distributions do (arXiv:2408.07978).

A plain decode step only writes the MTP layer's cache, which costs its key and value projections, and leaves no draft:
the first speculative step after it gives one token.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .adjust import Tables, count
from .cache import PageView
from .drafts import Newest, draft_next
from .steps import DeviceState, PromptLogprobs, StepInput, StepOutputs, draw, reported
from .transformer import Transformer

Rows = TypeVar("Rows")

AHEAD = 2  # tokens fed: the last one and its draft


def speculate_step(
    model: Transformer, state: DeviceState, batch: StepInput, *, num_top: int
) -> tuple[DeviceState, StepOutputs]:
    """One or two tokens of each row. length[r] is 2, or 1 where the row's draft is not to be used.

    The outputs have 2 b rows: r is what follows the last token, b + r what follows the draft and counts where
    `accepted[r]`. `start` and `tokens` of the batch are not read: the device knows better.
    """
    assert state.drafts is not None, "a state without drafts"
    live, slot = batch.length > 0, batch.slot
    start, draft = state.drafts.at(slot, live)
    tokens = jnp.stack([state.last_token[slot], jnp.maximum(draft, 0)], axis=1)
    view = PageView(batch.page_table, start[:, None] + jnp.arange(AHEAD, dtype=jnp.int32), batch.length)
    hidden, pools = model.hidden_paged(tokens, view, state.pools[:-1])
    out = _verify(model, hidden, state, batch, num_top, start, draft)
    first, second = jnp.split(out.token, AHEAD)
    assert out.accepted is not None
    accepted = out.accepted[: len(draft)]
    tables = _counted(_counted(state.tables, batch, first, live), batch, second, accepted)

    last_token, end = jnp.where(accepted, second, first), start + 1 + accepted  # the newest token, and where it is
    _, pool = model.mtp_paged(hidden, jnp.stack([first, second], axis=1), view, state.pools[-1])
    before = jnp.take_along_axis(hidden, accepted.astype(jnp.int32)[:, None, None], axis=1)
    newest = Newest(before, last_token, end, batch.page_table, live)
    next_draft, pool = draft_next(model, newest, pool, batch.sampling, batch.adjust, tables)
    drafts = state.drafts.put(slot, live, end, next_draft)
    return DeviceState((*pools, pool), state.last_token.at[slot].set(last_token), tables, drafts), out


def _verify(
    model: Transformer,
    hidden: Float[Array, "b 2 d"],
    state: DeviceState,
    batch: StepInput,
    num_top: int,
    start: Int[Array, " b"],
    draft: Int[Array, " b"],
) -> StepOutputs:
    """Draw after the last token and after the draft, and see which drafts were right."""
    both = batch._replace(
        targets=_doubled(batch.targets), sampling=_doubled(batch.sampling), adjust=_doubled(batch.adjust)
    )
    logits = model.logits(hidden.swapaxes(0, 1).reshape(-1, hidden.shape[-1]))
    # The second token counts only where the first is the draft: there the tables would have counted it.
    also = jnp.concatenate([jnp.full_like(draft, -1), draft])
    token = draw(model, logits, both, jnp.concatenate([start + 1, start + 2]), state.tables, also)
    drafted = (batch.length == AHEAD) & (draft >= 0)
    accepted, never = drafted & (token[: len(draft)] == draft), jnp.zeros_like(drafted)
    nothing = PromptLogprobs.none(len(token), AHEAD, num_top)
    return reported(model, logits, token, both, nothing, num_top)._replace(
        drafted=jnp.concatenate([drafted, never]), accepted=jnp.concatenate([accepted, never])
    )


def _doubled(rows: Rows) -> Rows:
    doubled: Rows = jax.tree.map(lambda array: jnp.concatenate([array, array]), rows)
    return doubled


def _counted(
    tables: Tables | None, batch: StepInput, token: Int[Array, " b"], which: Bool[Array, " b"]
) -> Tables | None:
    """`which`: rows whose token counts."""
    if tables is None or batch.adjust is None:
        return tables
    return count(tables, batch.adjust._replace(table=jnp.where(which, batch.adjust.table, 0)), token)

"""What could never run, told at once and with the numbers."""

from serving.errors import BadRequest, ContextLengthExceeded

from .kv_pool import KvPool
from .sequence import Sequence


class RowLimits:
    """`max_score_tokens`: the longest row that a score step takes, without KV pages."""

    def __init__(self, pool: KvPool, max_context: int, max_score_tokens: int) -> None:
        self._pool, self._max_context, self._max_score_tokens = pool, max_context, max_score_tokens

    def is_score(self, row: Sequence) -> bool:
        """One score step answers it. A profile lives in KV pages."""
        keeps_kv = row.profile is not None and row.may_reuse
        return row.max_new == 0 and row.num_prompt <= self._max_score_tokens and not keeps_kv

    def turns(self, row: Sequence) -> bool:
        """Whether its pages are used more than once: nobody can share them."""
        return self._pool.turns(row.num_kv)

    def check(self, row: Sequence) -> None:
        """ContextLengthExceeded where the row could never run, BadRequest for a profile that could not be kept. Any
        thread may call it."""
        asked = row.num_asked + row.max_new
        if asked > self._max_context:
            raise ContextLengthExceeded(
                f"the prompt has {row.num_asked} tokens and {row.max_new} are asked for: {asked} together, "
                f"the context is {self._max_context}; shorten the prompt or lower max_tokens"
            )
        if self.is_score(row):
            return
        if row.profile is not None and self.turns(row):
            raise BadRequest(
                f"prompt and answer may have {row.num_kv} tokens; where attention sees a window a profile is kept for "
                f"{self._pool.pages_for(row.num_kv) * self._pool.page_size} at most: leave profile_id out",
                param="profile_id",
            )
        need = self._pool.pages_for(row.num_kv)
        if need > self._pool.total:
            raise ContextLengthExceeded(
                f"{asked} tokens need {need} KV pages of {self._pool.page_size}; the cache has {self._pool.total}"
            )

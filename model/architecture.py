"""What a layer is, as frozen data: the kinds of rotary embedding, attention and feed-forward that exist.

A new family adds a dataclass here and a module beside attention.py or moe.py, and changes nothing else: every layer
names its own kinds, so families that mix them (an indexer, windows) need no special case.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. `interleaved`: pairs (0,1),(2,3),...; else channel i turns with i + dim/2."""

    dim: int
    theta: float
    interleaved: bool
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True  # yarn: the ramp's bounds are whole channels

    @property
    def cos_sin_factor(self) -> float:
        """The factor on cos and sin (YaRN, arXiv:2309.00071 section 3.4, as DeepSeek-V2 splits it)."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class Window:
    """A query sees the `size` positions that end with its own, and the first `sinks` ones (arXiv:2309.17453).

    Positions stay absolute: rotary embedding knows how far a sink is.
    """

    size: int
    sinks: int

    def sees(self, query: Any, key: Any) -> Any:
        """Of positions, numbers or arrays, key <= query."""
        return (key > query - self.size) | (key < self.sinks)


@dataclass(frozen=True, slots=True)
class GqaConfig:
    """Grouped-query attention with rotary embedding on the whole head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    o_bias: bool
    rope: RopeConfig
    window: Window | None = None  # None: every earlier position is visible

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434 section 2.1)."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    bias: bool
    rope: RopeConfig
    window: Window | None = None

    @property
    def scale(self) -> float:
        """1/sqrt(query dim), times mscale^2 when a scaled rope says so."""
        base = float((self.nope_dim + self.rope_dim) ** -0.5)
        if self.rope.kind == "default" or not self.rope.mscale_all_dim:
            return base
        return base * yarn_mscale(self.rope.factor, self.rope.mscale_all_dim) ** 2


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """SwiGLU feed-forward of one width."""

    width: int


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Routed experts plus one shared expert (`shared_width` 0: none)."""

    num_experts: int
    top_k: int
    width: int
    shared_width: int
    scoring: Literal["softmax", "sigmoid"]
    selection: Literal["greedy", "group_limited_greedy", "noaux_tc"]
    num_groups: int
    topk_groups: int
    normalise: bool
    scale: float


AttentionConfig = GqaConfig | MlaConfig
FfnConfig = DenseConfig | MoeConfig


@dataclass(frozen=True, slots=True)
class LayerConfig:
    attention: AttentionConfig
    ffn: FfnConfig

"""What a model is, as frozen data, read from the `config.json` that the hub has.

A model is a tuple of layers, each with an attention kind and a feed-forward kind of its own (model/architecture.py).
Invariant: a ModelConfig that exists can be built; whatever this project does not implement raises UnsupportedModel
with one line that says what was found and what is known.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .architecture import (
    AttentionConfig,
    DenseConfig,
    FfnConfig,
    GqaConfig,
    LayerConfig,
    MlaConfig,
    MoeConfig,
    RopeConfig,
)

Hub = Mapping[str, Any]


class UnsupportedModel(ValueError):
    """The config.json describes something that is not implemented, or is not a config at all."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    mtp_layers: tuple[LayerConfig, ...]
    rms_norm_eps: float
    max_position: int
    tie_embeddings: bool
    bos_id: int | None
    eos_ids: tuple[int, ...]
    stored_dtype: str | None = None  # of the checkpoint's floats, "float32", "bfloat16" or "float16"
    fp8_block: tuple[int, int] | None = None  # weights are stored as e4m3 with one scale per block

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_mtp_layers(self) -> int:
        return len(self.mtp_layers)

    @classmethod
    def from_hub(cls, hub: Hub) -> "ModelConfig":
        """Read a hub config. Raises UnsupportedModel."""
        name = hub.get("model_type")
        family = _FAMILIES.get(str(name))
        if family is None:
            raise UnsupportedModel(f"model_type {name!r} is not supported; known: {', '.join(sorted(_FAMILIES))}")
        try:
            config = family(hub)
        except KeyError as missing:
            raise UnsupportedModel(f"config.json of model_type {name!r} lacks the field {missing}") from None
        except (TypeError, AttributeError) as wrong:
            raise UnsupportedModel(f"config.json of model_type {name!r} has a field of a wrong type: {wrong}") from None
        _check(config, hub)
        return config

    @classmethod
    def load(cls, directory: Path | str) -> "ModelConfig":
        """Read DIRECTORY/config.json. Raises UnsupportedModel, FileNotFoundError."""
        path = Path(directory) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: a model directory holds config.json and its weights")
        try:
            hub = json.loads(path.read_text())
        except ValueError as error:
            raise UnsupportedModel(f"{path} is not JSON: {error}") from None
        if not isinstance(hub, dict):
            raise UnsupportedModel(f"{path} must hold an object, not {type(hub).__name__}")
        return cls.from_hub(hub)


def _check(config: ModelConfig, hub: Hub) -> None:
    """What every family shares: sizes are positive, and nothing is asked for that changes the result unseen."""
    if hub.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act {hub['hidden_act']!r} is not supported; only 'silu' is")
    if config.num_layers < 1 or config.hidden_size < 1 or config.vocab_size < 2:
        raise UnsupportedModel("num_hidden_layers, hidden_size and vocab_size must be positive")
    for layer in config.layers:
        attention = layer.attention
        if isinstance(attention, GqaConfig) and attention.num_heads % attention.num_kv_heads:
            raise UnsupportedModel(
                f"num_attention_heads {attention.num_heads} is not a multiple of "
                f"num_key_value_heads {attention.num_kv_heads}"
            )
        if attention.rope.dim % 2:
            raise UnsupportedModel(f"rope needs an even number of channels, got {attention.rope.dim}")
        if isinstance(layer.ffn, MoeConfig):
            _check_moe(layer.ffn)


def _check_moe(moe: MoeConfig) -> None:
    if moe.num_experts % moe.num_groups:
        raise UnsupportedModel(f"n_routed_experts {moe.num_experts} is not a multiple of n_group {moe.num_groups}")
    open_experts = moe.num_experts // moe.num_groups * moe.topk_groups if moe.num_groups > 1 else moe.num_experts
    if not 1 <= moe.top_k <= open_experts:
        raise UnsupportedModel(f"num_experts_per_tok {moe.top_k} does not fit {open_experts} selectable experts")


def _rope(hub: Hub, dim: int, *, interleaved: bool) -> RopeConfig:
    """Hub form (`rope_theta` + `rope_scaling`), or transformers 5's single `rope_parameters`."""
    scaling: Hub = hub.get("rope_scaling") or hub.get("rope_parameters") or {}
    theta = float(scaling.get("rope_theta") or hub.get("rope_theta") or 10000.0)
    kind: Any = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return RopeConfig(dim, theta, interleaved)
    if kind not in ("linear", "llama3", "yarn"):
        raise UnsupportedModel(f"rope_scaling type {kind!r} is not supported; known: default, linear, llama3, yarn")
    original = scaling.get("original_max_position_embeddings") or hub["max_position_embeddings"]
    factor = scaling.get("attention_factor")
    return RopeConfig(
        dim=dim,
        theta=theta,
        interleaved=interleaved,
        kind=kind,
        factor=float(scaling["factor"]),
        original_max_position=int(original),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        mscale=float(scaling.get("mscale") or 0.0),
        mscale_all_dim=float(scaling.get("mscale_all_dim") or 0.0),
        attention_factor=None if factor is None else float(factor),
    )


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)


def _model(hub: Hub, layers: list[LayerConfig], mtp_layers: list[LayerConfig] | None = None) -> ModelConfig:
    bos = hub.get("bos_token_id")
    return ModelConfig(
        model_type=str(hub["model_type"]),
        vocab_size=int(hub["vocab_size"]),
        hidden_size=int(hub["hidden_size"]),
        layers=tuple(layers),
        mtp_layers=tuple(mtp_layers or ()),
        rms_norm_eps=float(hub.get("rms_norm_eps", 1e-6)),
        max_position=int(hub["max_position_embeddings"]),
        tie_embeddings=bool(hub.get("tie_word_embeddings", False)),
        bos_id=None if bos is None else int(bos),
        eos_ids=_ids(hub.get("eos_token_id")),
        stored_dtype=_stored_dtype(hub),
        fp8_block=_fp8_block(hub),
    )


def _stored_dtype(hub: Hub) -> str | None:
    name = hub.get("torch_dtype") or hub.get("dtype")
    if name not in (None, "float32", "bfloat16", "float16"):
        raise UnsupportedModel(f"torch_dtype {name!r} is not supported; known: float32, bfloat16, float16")
    return name


def _fp8_block(hub: Hub) -> tuple[int, int] | None:
    quantization: Hub = hub.get("quantization_config") or {}
    if not quantization:
        return None
    if quantization.get("quant_method") != "fp8" or quantization.get("fmt", "e4m3") != "e4m3":
        raise UnsupportedModel(
            f"quantization_config with quant_method {quantization.get('quant_method')!r} and fmt "
            f"{quantization.get('fmt')!r} is not supported; known: fp8 with e4m3"
        )
    rows, columns = quantization.get("weight_block_size") or (128, 128)
    return int(rows), int(columns)


def _gqa(hub: Hub, *, qkv_bias: bool, o_bias: bool) -> GqaConfig:
    heads = int(hub["num_attention_heads"])
    head_dim = int(hub.get("head_dim") or int(hub["hidden_size"]) // heads)
    kv_heads = int(hub.get("num_key_value_heads") or heads)
    return GqaConfig(heads, kv_heads, head_dim, qkv_bias, o_bias, _rope(hub, head_dim, interleaved=False))


def _llama(hub: Hub) -> ModelConfig:
    if hub.get("mlp_bias"):
        raise UnsupportedModel("mlp_bias true is not supported")
    bias = bool(hub.get("attention_bias", False))
    layer = LayerConfig(_gqa(hub, qkv_bias=bias, o_bias=bias), DenseConfig(int(hub["intermediate_size"])))
    return _model(hub, [layer] * int(hub["num_hidden_layers"]))


def _qwen2(hub: Hub) -> ModelConfig:
    if hub.get("use_sliding_window"):
        raise UnsupportedModel("use_sliding_window true is not supported for qwen2")
    layer = LayerConfig(_gqa(hub, qkv_bias=True, o_bias=False), DenseConfig(int(hub["intermediate_size"])))
    return _model(hub, [layer] * int(hub["num_hidden_layers"]))


def _mla(hub: Hub) -> MlaConfig:
    rope_dim, rank = int(hub["qk_rope_head_dim"]), hub["q_lora_rank"]
    return MlaConfig(
        num_heads=int(hub["num_attention_heads"]),
        q_lora_rank=None if rank is None else int(rank),
        kv_lora_rank=int(hub["kv_lora_rank"]),
        nope_dim=int(hub["qk_nope_head_dim"]),
        rope_dim=rope_dim,
        v_dim=int(hub["v_head_dim"]),
        bias=bool(hub.get("attention_bias", False)),
        rope=_rope(hub, rope_dim, interleaved=True),
    )


def _moe(hub: Hub, **routing: Any) -> MoeConfig:
    width = int(hub["moe_intermediate_size"])
    return MoeConfig(
        num_experts=int(hub["n_routed_experts"]),
        top_k=int(hub["num_experts_per_tok"]),
        width=width,
        shared_width=width * int(hub.get("n_shared_experts") or 0),
        **routing,
    )


def _mixed(hub: Hub, attention: AttentionConfig, moe: Callable[[], MoeConfig], *, mtp: int = 0) -> ModelConfig:
    """Dense layers first, experts from `first_k_dense_replace` on; MTP layers are MoE layers beyond the last."""
    first, every = int(hub.get("first_k_dense_replace") or 0), int(hub.get("moe_layer_freq") or 1)
    dense, count = DenseConfig(int(hub["intermediate_size"])), int(hub["num_hidden_layers"])
    has_experts = hub.get("n_routed_experts") is not None

    def ffn(index: int) -> FfnConfig:
        return moe() if has_experts and index >= first and index % every == 0 else dense

    layers = [LayerConfig(attention, ffn(i)) for i in range(count)]
    return _model(hub, layers, [LayerConfig(attention, ffn(count + k)) for k in range(mtp)])


def _moe_16b(hub: Hub) -> ModelConfig:
    if hub.get("scoring_func", "softmax") != "softmax":
        raise UnsupportedModel(f"scoring_func {hub['scoring_func']!r} is not supported for model_type 'deepseek'")
    bias = bool(hub.get("attention_bias", False))

    def moe() -> MoeConfig:
        normalise = bool(hub.get("norm_topk_prob", False)) and int(hub["num_experts_per_tok"]) > 1
        return _moe(
            hub, scoring="softmax", selection="greedy", num_groups=1, topk_groups=1, normalise=normalise, scale=1.0
        )

    return _mixed(hub, _gqa(hub, qkv_bias=bias, o_bias=bias), moe)


def _v2(hub: Hub) -> ModelConfig:
    method = hub.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel(
            f"topk_method {method!r} is not supported for deepseek_v2; known: greedy, group_limited_greedy"
        )
    grouped = method == "group_limited_greedy"

    def moe() -> MoeConfig:
        return _moe(
            hub,
            scoring="softmax",
            selection=method,
            num_groups=int(hub["n_group"]) if grouped else 1,
            topk_groups=int(hub["topk_group"]) if grouped else 1,
            normalise=False,  # the published configs have norm_topk_prob false, and transformers ignores it
            scale=float(hub.get("routed_scaling_factor", 1.0)),
        )

    return _mixed(hub, _mla(hub), moe)


def _v3(hub: Hub) -> ModelConfig:
    method, scoring = hub.get("topk_method", "noaux_tc"), hub.get("scoring_func", "sigmoid")
    if (method, scoring) != ("noaux_tc", "sigmoid"):
        raise UnsupportedModel(
            f"topk_method {method!r} with scoring_func {scoring!r} is not supported for deepseek_v3; "
            "known: noaux_tc with sigmoid"
        )

    def moe() -> MoeConfig:
        return _moe(
            hub,
            scoring="sigmoid",
            selection="noaux_tc",
            num_groups=int(hub.get("n_group") or 1),
            topk_groups=int(hub.get("topk_group") or 1),
            normalise=bool(hub.get("norm_topk_prob", True)),
            scale=float(hub.get("routed_scaling_factor", 1.0)),
        )

    return _mixed(hub, _mla(hub), moe, mtp=int(hub.get("num_nextn_predict_layers") or 0))


_FAMILIES: Mapping[str, Callable[[Hub], ModelConfig]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "deepseek": _moe_16b,
    "deepseek_v2": _v2,
    "deepseek_v3": _v3,
}

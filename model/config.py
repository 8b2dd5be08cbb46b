"""What a model is, as frozen data, read from the `config.json` that the hub has.

A model is a tuple of layers, each with an attention kind and a feed-forward kind of its own (model/architecture.py).
Invariant: a ModelConfig that exists can be built; whatever this project does not implement raises UnsupportedModel
with one line that says what was found and what is known.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .architecture import AttentionConfig, DenseConfig, FfnConfig, GqaConfig, LayerConfig, MlaConfig, MoeConfig, Window
from .hub_fields import HubFields, shown
from .hub_fields import UnsupportedModel as UnsupportedModel
from .hub_rope import MOST_POSITIONS, read_rope

MOST_LAYERS, MOST_EXPERTS, MOST_HEADS = 1024, 4096, 1 << 14
MOST_WIDTH, MOST_VOCABULARY = 1 << 22, 1 << 24
MOST_TENSORS = 1 << 18  # experts of all layers: published models have up to 23,000


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

    def windowed(self, window: Window) -> "ModelConfig":
        """The same model, every layer of which sees no more than the window shows."""

        def narrow(layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
            return tuple(replace(layer, attention=replace(layer.attention, window=window)) for layer in layers)

        return replace(self, layers=narrow(self.layers), mtp_layers=narrow(self.mtp_layers))

    @classmethod
    def from_hub(cls, hub: Mapping[str, Any]) -> "ModelConfig":
        """Read a hub config. Raises UnsupportedModel."""
        name = hub.get("model_type")
        family = _FAMILIES.get(name) if isinstance(name, str) else None
        if family is None:
            known = ", ".join(sorted(_FAMILIES))
            raise UnsupportedModel(f"model_type {shown(name)} is not supported; known: {known}")
        fields = HubFields(hub, f"config.json of model_type {name!r}")
        if fields.get("hidden_act", "silu") != "silu":
            raise UnsupportedModel(f"hidden_act {shown(fields['hidden_act'])} is not supported; only 'silu' is")
        return family(fields)

    @classmethod
    def load(cls, directory: Path | str) -> "ModelConfig":
        """Read DIRECTORY/config.json. Raises UnsupportedModel, FileNotFoundError."""
        path = Path(directory) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: a model directory holds config.json and its weights")
        try:
            hub = json.loads(path.read_text("utf-8"))
        except (ValueError, RecursionError) as error:
            raise UnsupportedModel(f"{path} is not JSON: {error}") from None
        if not isinstance(hub, dict):
            raise UnsupportedModel(f"{path} must hold an object, not {type(hub).__name__}")
        return cls.from_hub(hub)


def _check_moe(moe: MoeConfig) -> None:
    if moe.num_experts % moe.num_groups:
        raise UnsupportedModel(f"n_routed_experts {moe.num_experts} is not a multiple of n_group {moe.num_groups}")
    open_experts = moe.num_experts // moe.num_groups * moe.topk_groups if moe.num_groups > 1 else moe.num_experts
    if not 1 <= moe.top_k <= open_experts:
        raise UnsupportedModel(f"num_experts_per_tok {moe.top_k} does not fit {open_experts} selectable experts")


def _width(hub: HubFields, name: str, default: int | None = None, *, least: int = 1) -> int:
    return hub.count(name, default, least=least, most=MOST_WIDTH)


def _model(hub: HubFields, layers: list[LayerConfig], mtp_layers: list[LayerConfig] | None = None) -> ModelConfig:
    vocabulary = hub.count("vocab_size", least=2, most=MOST_VOCABULARY)
    bos = hub.ids("bos_token_id")
    return ModelConfig(
        model_type=str(hub["model_type"]),
        vocab_size=vocabulary,
        hidden_size=_width(hub, "hidden_size"),
        layers=tuple(layers),
        mtp_layers=tuple(mtp_layers or ()),
        rms_norm_eps=hub.number("rms_norm_eps", 1e-6, positive=False),
        max_position=hub.count("max_position_embeddings", most=MOST_POSITIONS),
        tie_embeddings=hub.flag("tie_word_embeddings", False),
        bos_id=bos[0] if bos else None,
        eos_ids=hub.ids("eos_token_id"),
        stored_dtype=_stored_dtype(hub),
        fp8_block=_fp8_block(hub),
    )


def _stored_dtype(hub: HubFields) -> str | None:
    name = hub.get("torch_dtype") or hub.get("dtype")
    if name not in (None, "float32", "bfloat16", "float16"):
        raise UnsupportedModel(f"torch_dtype {shown(name)} is not supported; known: float32, bfloat16, float16")
    return name


def _fp8_block(hub: HubFields) -> tuple[int, int] | None:
    quantization = hub.group("quantization_config")
    if quantization is None:
        return None
    method, fmt = quantization.get("quant_method"), quantization.get("fmt", "e4m3")
    if (method, fmt) != ("fp8", "e4m3"):
        raise UnsupportedModel(
            f"quantization_config with quant_method {shown(method)} and fmt {shown(fmt)} is not supported; "
            "known: fp8 with e4m3"
        )
    block = quantization.get("weight_block_size") or [128, 128]
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and 0 < n <= MOST_WIDTH for n in block)):
        raise UnsupportedModel(f"weight_block_size is {shown(block)}; it must be two positive sizes, [rows, columns]")
    return block[0], block[1]


def _gqa(hub: HubFields, *, qkv_bias: bool, o_bias: bool) -> GqaConfig:
    heads = hub.count("num_attention_heads", most=MOST_HEADS)
    head_dim = _width(hub, "head_dim", _width(hub, "hidden_size") // heads)
    kv_heads = hub.count("num_key_value_heads", heads, most=MOST_HEADS)
    if heads % kv_heads:
        raise UnsupportedModel(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return GqaConfig(heads, kv_heads, head_dim, qkv_bias, o_bias, read_rope(hub, head_dim, interleaved=False))


def _num_layers(hub: HubFields) -> int:
    return hub.count("num_hidden_layers", most=MOST_LAYERS)


def _llama(hub: HubFields) -> ModelConfig:
    if hub.flag("mlp_bias", False):
        raise UnsupportedModel("mlp_bias true is not supported")
    bias = hub.flag("attention_bias", False)
    layer = LayerConfig(_gqa(hub, qkv_bias=bias, o_bias=bias), DenseConfig(_width(hub, "intermediate_size")))
    return _model(hub, [layer] * _num_layers(hub))


def _qwen2(hub: HubFields) -> ModelConfig:
    if hub.flag("use_sliding_window", False):
        raise UnsupportedModel("use_sliding_window true is not supported for qwen2")
    layer = LayerConfig(_gqa(hub, qkv_bias=True, o_bias=False), DenseConfig(_width(hub, "intermediate_size")))
    return _model(hub, [layer] * _num_layers(hub))


def _mla(hub: HubFields) -> MlaConfig:
    rope_dim = _width(hub, "qk_rope_head_dim", least=2)
    if "q_lora_rank" not in hub:  # null says "no latent"; absent says nothing
        raise UnsupportedModel(f"config.json of model_type {hub['model_type']!r} lacks the field 'q_lora_rank'")
    return MlaConfig(
        num_heads=hub.count("num_attention_heads", most=MOST_HEADS),
        q_lora_rank=None if hub["q_lora_rank"] is None else _width(hub, "q_lora_rank"),
        kv_lora_rank=_width(hub, "kv_lora_rank"),
        nope_dim=_width(hub, "qk_nope_head_dim"),
        rope_dim=rope_dim,
        v_dim=_width(hub, "v_head_dim"),
        bias=hub.flag("attention_bias", False),
        rope=read_rope(hub, rope_dim, interleaved=True),
    )


def _moe(hub: HubFields, **routing: Any) -> MoeConfig:
    width = _width(hub, "moe_intermediate_size")
    moe = MoeConfig(
        num_experts=hub.count("n_routed_experts", most=MOST_EXPERTS),
        top_k=hub.count("num_experts_per_tok", most=MOST_EXPERTS),
        width=width,
        shared_width=width * hub.count("n_shared_experts", 0, least=0, most=MOST_EXPERTS),
        **routing,
    )
    _check_moe(moe)
    return moe


def _groups(hub: HubFields) -> dict[str, int]:
    groups = hub.count("n_group", 1, most=MOST_EXPERTS)
    return {"num_groups": groups, "topk_groups": hub.count("topk_group", 1, most=groups)}


def _mixed(
    hub: HubFields, attention: AttentionConfig, moe: Callable[[], MoeConfig], *, every: int = 1, mtp: int = 0
) -> ModelConfig:
    """Dense layers first, experts from `first_k_dense_replace` on; MTP layers are MoE layers beyond the last."""
    count = _num_layers(hub)
    first = hub.count("first_k_dense_replace", 0, least=0, most=MOST_LAYERS)
    experts = moe() if hub.get("n_routed_experts") is not None else None
    needs_dense = experts is None or first > 0 or every > 1
    dense = DenseConfig(_width(hub, "intermediate_size", None if needs_dense else 1))
    if experts is not None and experts.num_experts * count > MOST_TENSORS:
        raise UnsupportedModel(f"{count} layers of {experts.num_experts} experts are more than {MOST_TENSORS} experts")

    def ffn(index: int) -> FfnConfig:
        return experts if experts is not None and index >= first and index % every == 0 else dense

    layers = [LayerConfig(attention, ffn(i)) for i in range(count)]
    return _model(hub, layers, [LayerConfig(attention, ffn(count + k)) for k in range(mtp)])


def _moe_16b(hub: HubFields) -> ModelConfig:
    if hub.get("scoring_func", "softmax") != "softmax":
        raise UnsupportedModel(f"scoring_func {shown(hub['scoring_func'])} is not supported for model_type 'deepseek'")
    bias = hub.flag("attention_bias", False)
    normalise = hub.flag("norm_topk_prob", False)

    def moe() -> MoeConfig:
        return _moe(
            hub, scoring="softmax", selection="greedy", num_groups=1, topk_groups=1, normalise=normalise, scale=1.0
        )

    every = hub.count("moe_layer_freq", 1, most=MOST_LAYERS)
    return _mixed(hub, _gqa(hub, qkv_bias=bias, o_bias=bias), moe, every=every)


def _v2(hub: HubFields) -> ModelConfig:
    method = hub.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel(
            f"topk_method {shown(method)} is not supported for deepseek_v2; known: greedy, group_limited_greedy"
        )

    def moe() -> MoeConfig:
        return _moe(
            hub,
            scoring="softmax",
            selection=method,
            **(_groups(hub) if method == "group_limited_greedy" else {"num_groups": 1, "topk_groups": 1}),
            normalise=False,  # the published configs have norm_topk_prob false, and transformers ignores it
            scale=hub.number("routed_scaling_factor", 1.0),
        )

    return _mixed(hub, _mla(hub), moe)


def _v3(hub: HubFields) -> ModelConfig:
    method, scoring = hub.get("topk_method", "noaux_tc"), hub.get("scoring_func", "sigmoid")
    if (method, scoring) != ("noaux_tc", "sigmoid"):
        raise UnsupportedModel(
            f"topk_method {shown(method)} with scoring_func {shown(scoring)} is not supported for deepseek_v3; "
            "known: noaux_tc with sigmoid"
        )

    def moe() -> MoeConfig:
        return _moe(
            hub,
            scoring="sigmoid",
            selection="noaux_tc",
            **_groups(hub),
            normalise=hub.flag("norm_topk_prob", True),
            scale=hub.number("routed_scaling_factor", 1.0),
        )

    mtp = hub.count("num_nextn_predict_layers", 0, least=0, most=MOST_LAYERS)
    return _mixed(hub, _mla(hub), moe, mtp=mtp)


_FAMILIES: Mapping[str, Callable[[HubFields], ModelConfig]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "deepseek": _moe_16b,
    "deepseek_v2": _v2,
    "deepseek_v3": _v3,
}

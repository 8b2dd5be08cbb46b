"""A GGUF's metadata as the hub config that says the same, and back. Architectures: llama, qwen2."""

from typing import Any

from .architecture import DenseConfig, GqaConfig
from .config import ModelConfig, UnsupportedModel
from .gguf_fields import GgufFields
from .gguf_file import GgufFile
from .gguf_names import ARCHITECTURES, ROPE_FREQS
from .gguf_rope import llama3_scaling, read_scaling, write_scaling
from .hub_fields import shown

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}


def hub_config(file: GgufFile, ignore: tuple[str, ...] = ()) -> tuple[dict[str, Any], list[str]]:
    """The config.json (token ids and dtype come from elsewhere) and the problems. Raises UnsupportedModel."""
    arch = file.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path.name}: general.architecture {shown(arch)} is not supported; known: {', '.join(ARCHITECTURES)}"
        )
    fields = GgufFields(file.metadata, arch)
    hub = {"architectures": [CLASSES[arch]], "model_type": arch, "hidden_act": "silu", "attention_dropout": 0.0}
    hub |= _sizes(fields) | _rope(file, fields)
    embedding = file.tensors.get("token_embd.weight")
    hub["vocab_size"] = embedding.shape[0] if embedding is not None else 2
    hub["tie_word_embeddings"] = "output.weight" not in file.tensors
    if arch == "llama":
        hub["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    return hub, fields.problems + fields.rest(ignore)


def _sizes(fields: GgufFields) -> dict[str, Any]:
    width, heads = fields.count("embedding_length"), fields.count("attention.head_count")
    head_dim = fields.count("attention.key_length", width // max(1, heads))
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.count(name, head_dim) != head_dim:
            fields.refuse(name, f"only the length of a head, {head_dim}, is supported")
    return {
        "hidden_size": width,
        "intermediate_size": fields.count("feed_forward_length"),
        "num_hidden_layers": fields.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.count("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
    }


def _rope(file: GgufFile, fields: GgufFields) -> dict[str, Any]:
    theta, scaling = fields.number("rope.freq_base", 10000.0), read_scaling(fields)
    divisors = file.tensors.get(ROPE_FREQS)
    if divisors is not None:
        if scaling is not None:
            fields.problems.append(f"{ROPE_FREQS} beside rope.scaling.type {scaling['rope_type']} is not supported")
        scaling = llama3_scaling(divisors.read().ravel(), theta) if theta > 1 else None
        if scaling is None:
            fields.problems.append(f"{ROPE_FREQS} follows no known rule (llama3 with factors 1 and 4)")
    return {"rope_theta": theta, "rope_scaling": scaling}


def gguf_keys(config: ModelConfig) -> tuple[dict[str, Any], Any]:
    """(metadata with the architecture's prefix, divisors of llama3's rope or None). Raises UnsupportedModel."""
    arch = config.model_type
    if arch not in ARCHITECTURES:
        raise UnsupportedModel(f"model_type {arch!r} cannot be written as GGUF; known: {', '.join(ARCHITECTURES)}")
    attention, ffn = config.layers[0].attention, config.layers[0].ffn
    assert isinstance(attention, GqaConfig)
    assert isinstance(ffn, DenseConfig)
    scaling, divisors = write_scaling(attention.rope)
    if divisors is not None and arch != "llama":
        raise UnsupportedModel(f"rope_scaling of type llama3 has no form in a GGUF of {arch}")
    keys = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": ffn.width,
        "attention.head_count": attention.num_heads,
        "attention.head_count_kv": attention.num_kv_heads,
        "attention.key_length": attention.head_dim,
        "attention.value_length": attention.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": attention.rope.dim,
        "rope.freq_base": attention.rope.theta,
    }
    return {f"{arch}.{name}": value for name, value in (keys | scaling).items()}, divisors

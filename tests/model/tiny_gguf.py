"""A llama-form model that is written by hand: its tensors in hub form, and GGUF files of it made with GGUFWriter."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from model.tokenizer import byte_alphabet

WIDTH, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS = 64, 4, 2, 16, 96, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ġ t", "h e", "Ġt he", "1 9", "i n", "Ġ Ġ")
TOKENS = (*SPECIAL, *sorted(byte_alphabet()), *(merge.replace(" ", "") for merge in MERGES), "tool call", "[PAD266]")
TYPES = [3] * len(SPECIAL) + [1] * (256 + len(MERGES)) + [4, 5]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
HUB_TO_GGUF = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def hub_tensors(*, bias: bool = False, tied: bool = True) -> dict[str, NDArray[np.float32]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(TOKENS), WIDTH)}
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    sizes = {
        "input_layernorm": (WIDTH,), "self_attn.q_proj": (q, WIDTH), "self_attn.k_proj": (kv, WIDTH),
        "self_attn.v_proj": (kv, WIDTH), "self_attn.o_proj": (WIDTH, q), "post_attention_layernorm": (WIDTH,),
        "mlp.gate_proj": (FFN, WIDTH), "mlp.up_proj": (FFN, WIDTH), "mlp.down_proj": (WIDTH, FFN),
    }  # fmt: skip
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in sizes.items()}
        if bias:
            shapes |= {f"model.layers.{layer}.self_attn.{p}_proj.bias": (r,) for p, r in zip("qkv", (q, kv, kv))}  # noqa: B905
    shapes["model.norm.weight"] = (WIDTH,)
    if not tied:
        shapes["lm_head.weight"] = (len(TOKENS), WIDTH)
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) * 0.3 for name, shape in shapes.items()}


def gguf_name(hub: str) -> str:
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
             "lm_head.weight": "output.weight"}  # fmt: skip
    if hub in whole:
        return whole[hub]
    _, _, layer, rest = hub.split(".", 3)
    name, _, leaf = rest.rpartition(".")
    return f"blk.{layer}.{HUB_TO_GGUF[name]}.{leaf}"


def permute(weights: NDArray[Any], heads: int) -> NDArray[Any]:
    """What llama.cpp's converter does to q and k of llama models (LlamaModel.permute)."""
    shape = weights.shape
    return weights.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def metadata(arch: str = "llama") -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "context_length": 512, "embedding_length": WIDTH, "block_count": LAYERS, "feed_forward_length": FFN,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 50000.0, "rope.dimension_count": HEAD_DIM,
    }  # fmt: skip
    tokenizer: dict[str, Any] = {
        "model": "gpt2", "pre": "smollm", "tokens": list(TOKENS), "token_type": TYPES, "merges": list(MERGES),
        "bos_token_id": 1, "eos_token_id": 2, "padding_token_id": 2, "eot_token_id": 0, "add_bos_token": False,
    }  # fmt: skip
    return (
        {f"{arch}.{k}": v for k, v in sizes.items()}
        | {f"tokenizer.ggml.{k}": v for k, v in tokenizer.items()}
        | {"tokenizer.chat_template": TEMPLATE}
    )


def write(
    path: Path,
    tensors: dict[str, NDArray[np.float32]],
    keys: dict[str, Any] | None = None,
    *,
    arch: str = "llama",
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: dict[str, NDArray[Any]] | None = None,
) -> Path:
    """A GGUF of hub-form `tensors`, matrices quantised to `kind`; `extra`: tensors under GGUF names, as they are."""
    writer = gguf.GGUFWriter(path, arch)
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (metadata(arch) if keys is None else keys).items():
        adders.get(type(value), writer.add_array)(key, value)
    for name, array in tensors.items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2]) if arch == "llama" else None
        stored = array if heads is None else permute(array, heads)
        if array.ndim > 1 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), gguf.quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(stored))
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

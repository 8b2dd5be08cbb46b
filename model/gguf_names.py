"""Tensors of llama form in both notations: hub names and llama.cpp's, and where the order of rows differs.

llama.cpp turns channels (0, 1), (2, 3), ... of a `llama` head; the hub's form turns i with i + dim/2. So its files hold
the rows of q and k in pairs. (`qwen2` files keep the hub's order.)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from .architecture import DenseConfig, GqaConfig, LayerConfig
from .config import ModelConfig

ARCHITECTURES = ("llama", "qwen2")
ROPE_FREQS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class TensorName:
    """`paired_heads`: rows are in this many heads whose channels stand in pairs in the GGUF; 0: as the hub has them."""

    hub: str
    gguf: str
    shape: tuple[int, ...]
    paired_heads: int = 0

    def from_gguf(self, array: NDArray[Any]) -> NDArray[Any]:
        return _swap(array, self.paired_heads, first=-1) if self.paired_heads else array

    def to_gguf(self, array: NDArray[Any]) -> NDArray[Any]:
        return _swap(array, self.paired_heads, first=2) if self.paired_heads else array


def _swap(array: NDArray[Any], heads: int, *, first: int) -> NDArray[Any]:
    """Rows [heads, 2, half] to [heads, half, 2] (`first` 2) or back (`first` -1)."""
    middle = 2 if first == 2 else array.shape[0] // heads // 2
    return array.reshape(heads, middle, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def tensor_names(config: ModelConfig) -> list[TensorName]:
    """Every tensor of a model of type llama or qwen2, in the order that llama.cpp writes them."""
    width, vocabulary = config.hidden_size, config.vocab_size
    names = [TensorName("model.embed_tokens.weight", "token_embd.weight", (vocabulary, width))]
    for index, layer in enumerate(config.layers):
        names += _layer(config, f"model.layers.{index}", f"blk.{index}", layer)
    names.append(TensorName("model.norm.weight", "output_norm.weight", (width,)))
    if not config.tie_embeddings:
        names.append(TensorName("lm_head.weight", "output.weight", (vocabulary, width)))
    return names


def _layer(config: ModelConfig, hub: str, gguf: str, layer: LayerConfig) -> Iterator[TensorName]:
    attention, ffn = layer.attention, layer.ffn
    assert isinstance(attention, GqaConfig)
    assert isinstance(ffn, DenseConfig)
    width = config.hidden_size
    yield TensorName(f"{hub}.input_layernorm.weight", f"{gguf}.attn_norm.weight", (width,))
    yield from _projections(config, hub, gguf, attention)
    yield TensorName(f"{hub}.post_attention_layernorm.weight", f"{gguf}.ffn_norm.weight", (width,))
    for name in ("gate", "up"):
        yield TensorName(f"{hub}.mlp.{name}_proj.weight", f"{gguf}.ffn_{name}.weight", (ffn.width, width))
    yield TensorName(f"{hub}.mlp.down_proj.weight", f"{gguf}.ffn_down.weight", (width, ffn.width))


def _projections(config: ModelConfig, hub: str, gguf: str, attention: GqaConfig) -> Iterator[TensorName]:
    width = config.hidden_size
    q, kv = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    paired = config.model_type == "llama"
    for name, short, rows, columns, heads, bias in (
        ("q_proj", "attn_q", q, width, attention.num_heads if paired else 0, attention.qkv_bias),
        ("k_proj", "attn_k", kv, width, attention.num_kv_heads if paired else 0, attention.qkv_bias),
        ("v_proj", "attn_v", kv, width, 0, attention.qkv_bias),
        ("o_proj", "attn_output", width, q, 0, attention.o_bias),
    ):
        yield TensorName(f"{hub}.self_attn.{name}.weight", f"{gguf}.{short}.weight", (rows, columns), heads)
        if bias:
            yield TensorName(f"{hub}.self_attn.{name}.bias", f"{gguf}.{short}.bias", (rows,), heads)

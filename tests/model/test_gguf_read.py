"""A GGUF written with llama.cpp's own writer comes back as the hub directory that it stands for."""

from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from model import convert
from model.audit import CheckpointError
from model.chat import ChatTemplate
from model.config import ModelConfig, UnsupportedModel
from model.gguf_read import read_gguf
from model.load import load_model
from model.tokenizer import Tokenizer
from tests.model import tiny_gguf as tiny


def problems_of(path: Path, target: Path, **options: Any) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        read_gguf(path, target, dtype=None, **options)
    return caught.value.problems


@pytest.mark.parametrize(
    ("arch", "bias", "tied"), [("llama", False, True), ("llama", False, False), ("qwen2", True, False)]
)
def test_tensors_and_config_are_those_of_the_hub_form(tmp_path: Path, arch: str, bias: bool, tied: bool) -> None:
    tensors = tiny.hub_tensors(bias=bias, tied=tied)
    assert convert.run(tiny.write(tmp_path / "m.gguf", tensors, arch=arch), tmp_path / "m") == 0
    found = load_file(tmp_path / "m" / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    config = ModelConfig.load(tmp_path / "m")
    assert (config.model_type, config.num_layers, config.hidden_size, config.tie_embeddings) == (arch, 2, 64, tied)
    assert (config.rms_norm_eps, config.max_position, config.bos_id, config.eos_ids) == (1e-5, 512, 1, (2, 0))
    attention = config.layers[0].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 2, 16)
    assert (attention.rope.theta, attention.rope.kind, attention.qkv_bias) == (50000.0, "default", bias)


def test_the_directory_serves(tmp_path: Path) -> None:
    convert.run(tiny.write(tmp_path / "m.gguf", tiny.hub_tensors()), tmp_path / "m")
    tokens = jnp.arange(5)[None]
    model = load_model(tmp_path / "m")
    assert jnp.isfinite(model.logits(model.hidden(tokens, tokens))).all()
    tokenizer, chat = Tokenizer.load(tmp_path / "m"), ChatTemplate.load(tmp_path / "m")
    assert chat is not None
    ids = chat.encode([{"role": "user", "content": "in the"}], tokenizer)
    named = [tiny.TOKENS[i] for i in ids]
    assert named == ["<|im_start|>", *"user", "Ċ", "in", "Ġthe", "<|im_end|>", "Ċ"]
    assert tokenizer.eos_ids == (2, 0)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_1", "F16", "BF16"])
def test_quantised_matrices_come_out_dequantised(tmp_path: Path, kind: str) -> None:
    ggml = gguf.GGMLQuantizationType[kind]
    tensors = tiny.hub_tensors()
    convert.run(tiny.write(tmp_path / "m.gguf", tensors, kind=ggml), tmp_path / "m", dtype="float32")
    found = load_file(tmp_path / "m" / "model.safetensors")
    for name, array in tensors.items():
        want = array if array.ndim == 1 else gguf.dequantize(gguf.quantize(array, ggml), ggml)
        np.testing.assert_array_equal(found[name], want, err_msg=name)  # whole rows move, so blocks stay whole


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "float32")])
def test_the_dtype_is_the_files_own_where_it_has_one(tmp_path: Path, kind: str, dtype: str) -> None:
    path = tiny.write(tmp_path / "m.gguf", tiny.hub_tensors(), kind=gguf.GGMLQuantizationType[kind])
    convert.run(path, tmp_path / "m")
    assert ModelConfig.load(tmp_path / "m").stored_dtype == dtype


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    tensors = tiny.hub_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = np.ones(3, np.float32)
    keys = tiny.metadata() | {"llama.logit_scale": 2.0, "tokenizer.ggml.pre": "tekken", "llama.expert_count": 8}
    del keys["llama.context_length"]
    surplus = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    path = tiny.write(tmp_path / "m.gguf", tensors, keys, extra=surplus)
    found = problems_of(path, tmp_path)
    for start in (
        "key: llama.context_length is missing",
        "key: llama.logit_scale is 2.0",
        "key: llama.expert_count is 8",
        "tokenizer: pre 'tekken' is not supported",
        "missing: blk.1.ffn_up.weight [96, 64]",
        "shape: output_norm.weight is [3]",
        "extra: blk.0.attn_sinks.weight [4]",
    ):
        assert any(problem.startswith(start) for problem in found), (start, found)
    assert len(found) == 7
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_surplus_can_be_left_out(tmp_path: Path) -> None:
    extra: dict[str, NDArray[Any]] = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    path = tiny.write(
        tmp_path / "m.gguf", tiny.hub_tensors(), tiny.metadata() | {"llama.logit_scale": 2.0}, extra=extra
    )
    convert.run(path, tmp_path / "m", ignore=("*.attn_sinks.*", "llama.logit_scale"))
    assert (tmp_path / "m" / "config.json").is_file()


def test_another_architecture_is_said_first(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", tiny.hub_tensors(), arch="gemma3")
    with pytest.raises(UnsupportedModel, match="'gemma3' is not supported; known: llama, qwen2"):
        convert.run(path, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_failed_conversion_leaves_no_model(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", {})
    with pytest.raises(CheckpointError, match="missing: token_embd"):
        convert.run(path, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_file_without_a_tokenizer_gives_a_model_without_one(tmp_path: Path) -> None:
    keys = {key: value for key, value in tiny.metadata().items() if not key.startswith("tokenizer.")}
    convert.run(tiny.write(tmp_path / "m.gguf", tiny.hub_tensors(), keys), tmp_path / "m")
    assert not (tmp_path / "m" / "tokenizer.json").exists()

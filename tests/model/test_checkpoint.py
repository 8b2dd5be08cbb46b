"""Loading refuses what is not the model, names all of it at once, and reads the rest exactly."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from model.audit import CheckpointError
from model.checkpoint import dequantise, load_hub, save_hub
from model.config import ModelConfig
from model.safetensors_file import read_header
from model.transformer import Transformer
from tests.model.shared import GOLDEN, hub_config


@pytest.fixture
def v3(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN / "v3", tmp_path / "v3")
    return tmp_path / "v3"


def edit(directory: Path, change: Any) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, directory / "model.safetensors")


def configure(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def problems(directory: Path, **options: Any) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        load_hub(directory, **options)
    return caught.value.problems


def logits(model: Transformer) -> np.ndarray:
    tokens = jnp.arange(6)[None]
    return np.asarray(model.logits(model.hidden(tokens, tokens)))


def test_all_faults_are_reported_at_once(v3):
    expert, norm = "model.layers.2.mlp.experts.3.up_proj.weight", "model.layers.1.input_layernorm.weight"

    def change(tensors):
        tensors["model.layers.9.self_attn.o_proj.weight"] = tensors["model.layers.3.self_attn.o_proj.weight"]
        del tensors[expert]
        tensors["lm_head.weight"] = tensors["lm_head.weight"].T
        tensors[norm] = tensors[norm].astype(np.float16)
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int32)

    edit(v3, change)
    found = problems(v3)
    wants = [
        "missing: " + expert,
        "extra: model.layers.9.",
        "shape: lm_head.weight",
        "dtype: " + norm,
        "dtype: model.norm",
    ]
    for want in wants:
        assert sum(line.startswith(want) for line in found) == 1, (want, found)
    # the transposed head is not the MTP layer's head any more either
    assert len(found) == len(wants) + 1


def test_a_renamed_layer_is_missing_and_extra(v3):
    edit(v3, lambda t: t.update({"model.layers.0.mlp.gate.weight": t.pop("model.layers.0.mlp.gate_proj.weight")}))
    found = problems(v3)
    assert [line.split(":")[0] for line in found] == ["missing", "extra"]


def test_a_deeper_checkpoint_is_refused_unless_its_extras_are_named(v3):
    configure(v3, num_nextn_predict_layers=0)
    assert all(line.startswith("extra: model.layers.4.") for line in problems(v3))
    shallow = load_hub(v3, ignore=("model.layers.4.*",))
    np.testing.assert_array_equal(logits(shallow), logits(load_hub(GOLDEN / "v3")))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", ["absent", "same", "different"])
def test_tied_embeddings_are_decided_by_config_and_file(tmp_path, tied, head):
    target = tmp_path / "llama"
    shutil.copytree(GOLDEN / "llm_7b", target)
    configure(target, tie_word_embeddings=tied)

    def change(tensors):
        if head == "absent":
            del tensors["lm_head.weight"]
        elif head == "same":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    edit(target, change)
    if (tied, head) == (False, "absent"):
        assert problems(target)[0].startswith("missing: lm_head.weight")
    elif (tied, head) == (True, "different"):
        assert problems(target) == ("differs: lm_head.weight must repeat model.embed_tokens.weight and does not",)
    else:
        model = load_hub(target)
        tokens = jnp.arange(6)[None]
        hidden = model.hidden(tokens, tokens)
        weights = load_file(target / "model.safetensors")
        matrix = weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
        np.testing.assert_allclose(logits(model), np.asarray(hidden) @ matrix.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(576, 256), (130, 300), (128, 128), (1, 1)])
def test_fp8_blocks_equal_a_float64_loop(shape):
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.random((-(-shape[0] // 128), -(-shape[1] // 128))).astype(np.float32)
    out = np.empty(shape, np.float32)
    dequantise(weight, scale, (128, 128), out)
    wide = weight.astype(np.float64)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            wide[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128] *= np.float64(scale[i, j])
    np.testing.assert_allclose(out, wide, rtol=1e-6)


def test_fp8_scales_of_a_wrong_shape_are_refused(tmp_path):
    target = tmp_path / "fp8"
    shutil.copytree(GOLDEN / "v3_fp8", target)
    name = "model.layers.0.self_attn.q_b_proj.weight_scale_inv"
    raw = (target / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header[name]["shape"] = (
        header[name]["shape"][::-1] if len(set(header[name]["shape"])) > 1 else [1, *header[name]["shape"]]
    )
    new = json.dumps(header).encode()
    (target / "model.safetensors").write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + length :])
    assert problems(target)[0].startswith("shape: " + name)
    configure(target, quantization_config=None)
    assert any("has no fp8 quantization_config" in line for line in problems(target))


def test_the_index_and_its_files_must_agree(tmp_path):
    target = tmp_path / "sharded"
    shutil.copytree(GOLDEN / "v2_noyarn", target)
    index_path = target / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    names = list(index["weight_map"])
    index["weight_map"][names[0]] = "../elsewhere.safetensors"
    files = sorted({file for file in index["weight_map"].values() if file.startswith("model")})
    index["weight_map"][names[1]] = next(file for file in files if file != index["weight_map"][names[1]])
    index_path.write_text(json.dumps(index))
    found = problems(target)
    assert any("'../elsewhere.safetensors'" in line for line in found)
    assert any(f"{names[1]} is not listed for this file" in line for line in found)
    assert any(f"{names[1]} is listed by the index but not in the file" in line for line in found)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", '{"weight_map": {"a": "x", "a": "y"}}', '{"weight_map": [1]}'])
def test_an_index_that_is_none(v3, text):
    (v3 / "model.safetensors.index.json").write_text(text)
    assert "is not an object with a weight_map" in problems(v3)[0]


def test_a_config_far_larger_than_the_files_is_one_line(v3):
    configure(v3, num_hidden_layers=64, n_routed_experts=4096)
    assert len(problems(v3)) == 1


def test_scales_that_are_no_numbers_are_refused(tmp_path):
    target = tmp_path / "fp8"
    shutil.copytree(GOLDEN / "v3_fp8", target)
    info = next(t for n, t in read_header(target / "model.safetensors")[0].items() if n.endswith("_scale_inv"))
    with (target / "model.safetensors").open("r+b") as file:
        file.seek(info.begin)
        file.write(struct.pack("<f", float("nan")))
    assert problems(target) == (f"value: {info.name} has 1 scales that are negative or not finite",)


def header_file(path: Path, header: Any, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


@pytest.mark.parametrize(
    ("header", "word"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "needs 8 bytes"),
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, "the file at"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "shape"),
        ({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, "shape"),
        ({"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}, "unknown"),
        ({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, "unknown"),
        ({"a": {"dtype": "F32", "shape": [10**3000] * 8, "data_offsets": [0, 4]}}, "too long to show"),
        ({"\x1b[31m": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}, "printable"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, "belong to no tensor"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, "at its end, belong to no tensor"),
        ({"a": {"shape": [1]}}, "lacks"),
        ({"a": 3}, "lacks"),
        ([], "not a JSON object"),
        (b"{", "not a JSON object"),
        (b"[" * 100_000, "not a JSON object"),
        (b'{"a": 1, "a": 2}', "twice"),
        ({n: {"dtype": "F32", "shape": [2], "data_offsets": [o, o + 8]} for n, o in (("a", 0), ("b", 4))}, "overlap"),
    ],
)
def test_faulty_headers_are_named(tmp_path, header, word):
    _, found = read_header(header_file(tmp_path / "x.safetensors", header, b"\0" * 12))
    assert any(word in line for line in found), found


def test_absurd_header_lengths(tmp_path):
    path = tmp_path / "x.safetensors"
    for raw in (b"", b"\1\2", struct.pack("<Q", 1 << 62) + b"{}", struct.pack("<Q", 3) + b"{}"):
        path.write_bytes(raw)
        assert read_header(path)[1]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_no_bytes_crash_the_reader(tmp_path, raw):
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    read_header(path)
    header_file(path, raw)
    read_header(path)


@pytest.mark.parametrize("variant", ["v3", "llama_tied"])
def test_what_is_saved_is_what_is_loaded(tmp_path, variant):
    model = load_hub(GOLDEN / variant)
    save_hub(model, hub_config(variant), tmp_path, dtype=jnp.dtype(jnp.float32))
    again = load_hub(tmp_path)
    np.testing.assert_array_equal(logits(model), logits(again))
    written, original = load_file(tmp_path / "model.safetensors"), load_file(GOLDEN / variant / "model.safetensors")
    assert written.keys() <= original.keys()
    for name, tensor in written.items():
        np.testing.assert_array_equal(tensor, original[name])


def test_dtype_of_the_loaded_model():
    model = load_hub(GOLDEN / "v3_bf16", dtype=jnp.dtype(jnp.bfloat16))
    flat = {".".join(map(str, path)): param.dtype for path, param in nnx.to_flat_state(nnx.state(model))}
    assert {dtype for name, dtype in flat.items() if "gate.kernel" not in name and "bias" not in name} == {
        jnp.dtype(jnp.bfloat16)
    }
    assert flat["layers.1.mlp.gate.kernel"] == jnp.float32
    assert ModelConfig.load(GOLDEN / "v3_bf16").stored_dtype == "bfloat16"

"""What is written as GGUF says the same as the hub directory, to the library's reader and to our own."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model import convert
from model.audit import CheckpointError
from model.config import ModelConfig, UnsupportedModel
from tests.model import tiny_gguf as tiny
from tests.model.shared import GOLDEN

LLAMA_FORMS = ("llm_7b", "coder_linear_rope", "llama_tied", "r1_distill_llama", "r1_distill_qwen")


@pytest.fixture
def tiny_hub(tmp_path: Path) -> Path:
    convert.run(tiny.write(tmp_path / "first.gguf", tiny.hub_tensors(tied=False)), tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.mark.parametrize("variant", LLAMA_FORMS)
def test_there_and_back_is_the_same_model(tmp_path: Path, variant: str) -> None:
    convert.run(GOLDEN / variant, tmp_path / "m.gguf", to="gguf")
    convert.run(tmp_path / "m.gguf", tmp_path / "back")
    want, got = ModelConfig.load(GOLDEN / variant), ModelConfig.load(tmp_path / "back")
    for field in (
        "model_type",
        "vocab_size",
        "hidden_size",
        "layers",
        "rms_norm_eps",
        "max_position",
        "tie_embeddings",
    ):
        assert getattr(got, field) == getattr(want, field), field
    tensors, back = (load_file(root / "model.safetensors") for root in (GOLDEN / variant, tmp_path / "back"))
    assert back.keys() == tensors.keys() - ({"lm_head.weight"} if want.tie_embeddings else set())
    for name, array in back.items():
        np.testing.assert_array_equal(array, tensors[name].astype(np.float32), err_msg=name)


def test_the_file_is_what_llama_cpps_converter_would_write(tiny_hub: Path, tmp_path: Path) -> None:
    convert.run(tiny_hub, tmp_path / "m.gguf", to="gguf")
    got, want = gguf.GGUFReader(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "first.gguf")
    theirs = {tensor.name: tensor for tensor in want.tensors}
    assert {tensor.name for tensor in got.tensors} == theirs.keys()
    for tensor in got.tensors:
        np.testing.assert_array_equal(tensor.data, theirs[tensor.name].data, err_msg=tensor.name)
    assert got.fields["general.architecture"].contents() == "llama"
    for key in tiny.metadata():
        assert got.fields[key].contents() == want.fields[key].contents(), key
        assert got.fields[key].types == want.fields[key].types, key


def test_q8_0_is_the_librarys_own(tiny_hub: Path, tmp_path: Path) -> None:
    convert.run(tiny_hub, tmp_path / "m.gguf", to="gguf", dtype="q8_0")
    hub = {tiny.gguf_name(name): array for name, array in load_file(tiny_hub / "model.safetensors").items()}
    for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors:
        matrix = tensor.name.endswith("weight") and "norm" not in tensor.name
        assert tensor.tensor_type.name == ("Q8_0" if matrix else "F32"), tensor.name
        if matrix and "attn_q" not in tensor.name and "attn_k" not in tensor.name:
            want = gguf.quantize(hub[tensor.name], gguf.GGMLQuantizationType.Q8_0)
            np.testing.assert_array_equal(tensor.data, want, err_msg=tensor.name)


def test_rows_that_are_not_whole_blocks_stay_float32(tmp_path: Path) -> None:
    convert.run(GOLDEN / "llama_tied", tmp_path / "m.gguf", to="gguf", dtype="q8_0")  # 66 wide, 97 in between
    tensors = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert tensors["blk.0.ffn_up.weight"] == "F32"


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="'deepseek_v2' cannot be written as GGUF"):
        convert.run(GOLDEN / "v2", tmp_path / "m.gguf", to="gguf")
    assert not list(tmp_path.iterdir())


def test_problems_of_weights_and_tokenizer_are_told_together(tiny_hub: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny_hub / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tiny_hub / "model.safetensors")
    text = (tiny_hub / "tokenizer.json").read_text("utf-8")
    (tiny_hub / "tokenizer.json").write_text(
        text.replace('"normalizer": null', '"normalizer": {"type": "NFC"}'), "utf-8"
    )
    with pytest.raises(CheckpointError) as caught:
        convert.run(tiny_hub, tmp_path / "m.gguf", to="gguf")
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["missing", "tokenizer"]
    assert not (tmp_path / "m.gguf").exists()


def test_wrong_uses_are_refused(tiny_hub: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="known: f32, q8_0"):
        convert.run(tiny_hub, tmp_path / "m.gguf", to="gguf", dtype="bfloat16")
    with pytest.raises(ValueError, match="'onnx' is not supported"):
        convert.run(tiny_hub, tmp_path / "m", to="onnx")
    with pytest.raises(ValueError, match="to a directory first"):
        convert.run(tmp_path / "first.gguf", tmp_path / "m.gguf", to="gguf")
    with pytest.raises(FileExistsError):
        convert.run(tiny_hub, tmp_path / "first.gguf", to="gguf")

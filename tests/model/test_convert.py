"""A converted model is the same model, and a broken one does not load."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from model import convert
from model.audit import CheckpointError
from model.load import load_model
from tests.model.shared import GOLDEN


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("converted") / "v3_fp8"
    assert convert.run(GOLDEN / "v3_fp8", target) == 0
    return target


def logits(model):
    tokens = jnp.arange(9)[None]
    return np.asarray(model.logits(model.hidden(tokens, tokens)))


def test_both_forms_give_the_same_logits(converted):
    np.testing.assert_array_equal(logits(load_model(converted)), logits(load_model(GOLDEN / "v3_fp8")))


def test_the_dtype_can_be_chosen(tmp_path):
    convert.run(GOLDEN / "llm_7b", tmp_path / "narrow", dtype="bfloat16")
    model = load_model(tmp_path / "narrow")
    assert model.embed_tokens.weight().dtype == jnp.bfloat16
    want = load_model(GOLDEN / "llm_7b", dtype=jnp.dtype(jnp.bfloat16))
    np.testing.assert_array_equal(logits(model), logits(want))


def test_swapped_layers_are_caught_by_their_checksums(converted, tmp_path):
    target = tmp_path / "swapped"
    shutil.copytree(converted, target)
    manifest = json.loads((target / "manifest.json").read_text())
    names = [f"layers.{i}.self_attn.o_proj.kernel" for i in (0, 1)]
    params = manifest["params"]
    params[names[0]], params[names[1]] = params[names[1]], params[names[0]]
    (target / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError) as caught:
        load_model(target)
    assert [line.split()[1] for line in caught.value.problems] == names


def test_a_manifest_that_does_not_fit_is_refused(converted, tmp_path):
    target = tmp_path / "other"
    shutil.copytree(converted, target)
    manifest = json.loads((target / "manifest.json").read_text())
    manifest["params"]["surplus"] = manifest["params"].pop("norm.scale")
    (target / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"missing: norm\.scale"):
        load_model(target)
    (target / "manifest.json").write_text(json.dumps({"format": "other", "params": {}}))
    with pytest.raises(CheckpointError, match="format 'other'"):
        load_model(target)


def test_an_unfinished_conversion_can_be_repeated(tmp_path):
    target = tmp_path / "again"
    (tmp_path / "again.partial" / "params").mkdir(parents=True)
    (tmp_path / "again.partial" / "params" / "leftover").write_text("of a killed run")
    target.mkdir()
    convert.run(GOLDEN / "llm_7b", target)
    assert [path.name for path in tmp_path.iterdir()] == ["again"]
    with pytest.raises(FileExistsError, match="already holds"):
        convert.run(GOLDEN / "llm_7b", target)
    with pytest.raises(ValueError, match="already converted"):
        convert.run(target, tmp_path / "twice")
    load_model(target)


def test_a_directory_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "params").mkdir()
    (tmp_path / "params" / "precious").write_text("of someone else")
    with pytest.raises(FileExistsError, match="not an empty directory"):
        convert.run(GOLDEN / "llm_7b", tmp_path)
    assert (tmp_path / "params" / "precious").is_file()


def test_an_unknown_dtype_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(ValueError, match="'int8' is not supported"):
        convert.run(tmp_path / "nowhere", tmp_path / "out", dtype="int8")


@pytest.mark.parametrize("entry", [3, {}, {"shape": [1], "dtype": "int8", "sha256": ""}])
def test_a_manifest_with_broken_entries_is_refused(converted, tmp_path, entry):
    target = tmp_path / "other"
    shutil.copytree(converted, target)
    manifest = json.loads((target / "manifest.json").read_text())
    manifest["params"]["embed_tokens.embedding"] = entry
    (target / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="lacks a shape, a dtype or a sha256"):
        load_model(target)

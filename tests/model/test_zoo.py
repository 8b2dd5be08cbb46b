"""The embedded model as it is shipped: its files, its size, and what its card says it reaches."""

import csv
import json
import re
from pathlib import Path

import jax
import pytest
from flax import nnx

from model.chat import ChatTemplate
from model.config import ModelConfig, MoeConfig
from model.evaluate import auc, label_probabilities
from model.examples import encode_rows, label_ids
from model.load import load_model
from model.template import Template
from model.tokenizer import Tokenizer
from model.vocabulary import template_words, tokenizer_config, tokenizer_definition

DATA = Path(__file__).parents[2] / "data" / "credit_default"
AUC_FLOOR, ACCURACY_FLOOR = 0.775, 0.815


@pytest.fixture(scope="module")
def template(zoo: Path) -> Template:
    return Template.load(zoo / "template.toml")


def test_reaches_what_its_card_says(zoo: Path, template: Template, zoo_tokenizer: Tokenizer) -> None:
    """The shipped weights on all 6,000 test rows."""
    with (DATA / "test.csv").open(newline="") as file:
        rows = encode_rows(list(csv.DictReader(file)), template, zoo_tokenizer)
    assert len(rows) == 6000
    probabilities = label_probabilities(load_model(zoo), rows, label_ids(template, zoo_tokenizer))
    names = [label.name for label in template.labels]
    bad = rows.label == names.index("bad")
    decided = [template.decide(dict(zip(names, row, strict=True))) == "bad" for row in probabilities]
    area, accuracy = auc(probabilities[:, names.index("bad")], bad), float((decided == bad).mean())
    assert area >= AUC_FLOOR
    assert accuracy >= ACCURACY_FLOOR
    card = (zoo / "README.md").read_text("utf-8")
    stated = re.search(r"\| credit-mini \| (0\.\d+) \| (0\.\d+) \|", card)
    assert stated is not None
    assert [float(x) for x in stated.groups()] == [pytest.approx(area, abs=6e-4), pytest.approx(accuracy, abs=6e-4)]


def test_size_and_architecture(zoo: Path) -> None:
    hub = json.loads((zoo / "config.json").read_text())
    assert hub["architectures"] == ["DeepseekV3ForCausalLM"]
    config = ModelConfig.from_hub(hub)
    assert not isinstance(config.layers[0].ffn, MoeConfig)
    for layer in (*config.layers[1:], *config.mtp_layers):
        assert isinstance(layer.ffn, MoeConfig)
        assert layer.ffn.selection == "noaux_tc"
        assert layer.ffn.num_groups > 1
        assert layer.ffn.shared_width
    assert config.num_mtp_layers == 1
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(load_model(zoo))))
    assert 300_000 <= count <= 1_200_000
    assert (zoo / "model.safetensors").stat().st_size <= 5_000_000


def test_the_tokenizer_is_the_template_s(zoo: Path, template: Template, zoo_tokenizer: Tokenizer) -> None:
    config = ModelConfig.load(zoo)
    assert json.loads((zoo / "tokenizer.json").read_text("utf-8")) == tokenizer_definition(template_words(template))
    assert json.loads((zoo / "tokenizer_config.json").read_text("utf-8")) == tokenizer_config(config.max_position)
    assert (config.vocab_size, config.bos_id, config.eos_ids) == (
        zoo_tokenizer.vocab_size,
        zoo_tokenizer.bos_id,
        zoo_tokenizer.eos_ids,
    )


def test_sex_and_marriage_stay_out(template: Template) -> None:
    with (DATA / "train.csv").open(newline="") as file:
        columns = next(csv.reader(file))
    assert set(template.columns) == set(columns) - {"sex", "marriage", "default"}
    assert template.label_column == "default"


def test_the_issue_s_labels(template: Template) -> None:
    assert {x.name: (x.text, x.value, x.positive) for x in template.labels} == {
        "good": (" good", 0, False),
        "bad": (" bad", 1, True),
    }


def test_chat_works_on_it(zoo: Path, zoo_tokenizer: Tokenizer) -> None:
    chat = ChatTemplate.load(zoo)
    assert chat is not None
    ids = chat.encode([{"role": "user", "content": "hi"}], zoo_tokenizer)
    assert zoo_tokenizer.decode(ids) == "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜>"


def test_csv_strings_and_numbers_render_alike(template: Template) -> None:
    with (DATA / "test.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))[:200]
    for row in rows:
        numbers = {column: float(row[column]) for column in template.columns}
        assert template.render(row) == template.render(numbers)

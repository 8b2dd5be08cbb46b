"""Reading hub configs: what is known is read right, what is not is one clear line."""

import json
from pathlib import Path

import pytest

from model.architecture import DenseConfig, GqaConfig, MlaConfig, MoeConfig
from model.config import ModelConfig, UnsupportedModel

GOLDEN = Path(__file__).parents[1] / "golden"


def hub(name, **changes):
    return json.loads((GOLDEN / name / "config.json").read_text()) | changes


def test_v3_layers_and_attention():
    config = ModelConfig.from_hub(hub("v3"))
    assert [type(layer.ffn) for layer in config.layers] == [DenseConfig, MoeConfig, MoeConfig, MoeConfig]
    assert config.num_mtp_layers == 1
    moe = config.layers[1].ffn
    assert (moe.scoring, moe.selection, moe.num_groups, moe.scale) == ("sigmoid", "noaux_tc", 4, 2.5)
    attention = config.layers[0].attention
    assert isinstance(attention, MlaConfig)
    assert attention.rope.interleaved
    assert attention.scale == pytest.approx(24**-0.5 * (0.1 * 3.6888794541139363 + 1) ** 2)


def test_biases_of_the_llama_forms():
    def biases(config):
        attention = ModelConfig.from_hub(config).layers[0].attention
        assert isinstance(attention, GqaConfig)
        return attention.qkv_bias, attention.o_bias

    assert biases(hub("llm_7b")) == (False, False)
    assert biases(hub("llm_7b", attention_bias=True)) == (True, True)
    assert biases(hub("r1_distill_qwen")) == (True, False)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (hub("v32"), "deepseek_v32"),
        (hub("v4"), "deepseek_v4"),
        (hub("llm_7b", hidden_act="gelu"), "gelu"),
        (hub("llm_7b", rope_scaling={"type": "dynamic", "factor": 2}), "dynamic"),
        (hub("r1_distill_qwen", use_sliding_window=True), "use_sliding_window"),
        (hub("v2", topk_method="noaux_tc"), "noaux_tc"),
        (hub("v3", scoring_func="softmax"), "softmax"),
        (hub("v3", n_group=5), "n_group"),
        (hub("v3_fp8", quantization_config={"quant_method": "gptq"}), "gptq"),
        (hub("v3", hidden_size=None), "wrong type"),
        ({"model_type": "llama"}, "lacks the field"),
        ({}, "None"),
    ],
)
def test_what_is_not_supported_is_one_line(config, word):
    with pytest.raises(UnsupportedModel, match=word) as caught:
        ModelConfig.from_hub(config)
    assert "\n" not in str(caught.value)


def test_load_says_what_is_wrong_with_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        ModelConfig.load(tmp_path)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UnsupportedModel):
            ModelConfig.load(tmp_path)

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
        (hub("v3", hidden_size=None), "lacks the field 'hidden_size'"),
        (hub("v3", hidden_size="48"), "hidden_size is '48'"),
        (hub("v3", hidden_size=True), "hidden_size is True"),
        (hub("v3", num_hidden_layers=10**9), "from 1 to 1024"),
        (hub("v3", num_hidden_layers=1000, n_routed_experts=4096), "more than"),
        (hub("v3", n_routed_experts=10**9), "n_routed_experts"),
        (hub("v3", vocab_size=-1), "vocab_size"),
        (hub("v3", kv_lora_rank=1e400), "kv_lora_rank is inf"),
        (hub("v3", qk_rope_head_dim=7), "even number"),
        (hub("v3", n_group=0), "n_group"),
        (hub("v3", topk_group=5), "topk_group"),
        (hub("v3", rms_norm_eps=float("nan")), "rms_norm_eps is nan"),
        (hub("v3", rope_theta=0.5), "rope_theta"),
        (hub("v3", rope_scaling="yarn"), "rope_scaling is 'yarn'"),
        (hub("v3", rope_scaling={"type": "yarn", "factor": None}), "factor"),
        (hub("v3", rope_scaling={"type": ["yarn"]}), "rope_scaling type"),
        (hub("v3", partial_rotary_factor=0.5), "partial_rotary_factor"),
        (hub("v3", eos_token_id="<eos>"), "eos_token_id"),
        (hub("llm_7b", num_attention_heads=0), "num_attention_heads"),
        (hub("llm_7b", num_key_value_heads=3), "multiple of num_key_value_heads"),
        (hub("llm_7b", torch_dtype=["float32"]), "torch_dtype"),
        (hub("llm_7b", hidden_size=10**5000), "too long to show"),
        (hub("r1_distill_llama", rope_scaling={"rope_type": "llama3", "factor": 8, "low_freq_factor": 4}), "low_freq"),
        (hub("v3_fp8", quantization_config={"quant_method": "fp8", "weight_block_size": [128]}), "weight_block_size"),
        (hub("v3_fp8", quantization_config={"quant_method": "fp8", "weight_block_size": [0, 0]}), "weight_block_size"),
        ({"model_type": ["llama"]}, "model_type"),
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
    for text in ("{", "[]", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UnsupportedModel):
            ModelConfig.load(tmp_path)


def test_eos_may_be_a_list_and_bos_null():
    config = ModelConfig.from_hub(hub("llm_7b", eos_token_id=[7, 1], bos_token_id=None))
    assert (config.bos_id, config.eos_ids) == (None, (7, 1))


def test_only_moe_16b_spaces_its_expert_layers():
    def experts(name):
        config = ModelConfig.from_hub(hub(name, moe_layer_freq=2, num_hidden_layers=4, first_k_dense_replace=1))
        return [isinstance(layer.ffn, MoeConfig) for layer in config.layers]

    assert experts("moe_16b") == [False, False, True, False]
    assert experts("v3") == [False, True, True, True]

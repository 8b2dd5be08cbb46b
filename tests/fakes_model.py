"""A small random DeepSeek-V3-form model: MLA, a dense and a MoE layer, groups, a shared expert, an MTP layer."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from model.config import ModelConfig
from model.transformer import Transformer

TINY_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def tiny_model(seed: int = 0, **changes: Any) -> Transformer:
    config = ModelConfig.from_hub({**TINY_V3, **changes})
    return Transformer(config, rngs=nnx.Rngs(seed), dtype=jnp.dtype(jnp.float32))

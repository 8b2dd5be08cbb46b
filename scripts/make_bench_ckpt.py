"""Checkpoints for benchmarks, about 200 M parameters: python -m scripts.make_bench_ckpt v2|llama DIR [--layers N]

v2 is of DeepSeek-V2's form (MLA with its own sizes per head, 16 experts of which 4 are used), llama of DeepSeek-LLM's.
The weights are random and depend on the tensor's name only; norms are 1. Every token of the vocabulary is text, so that
each one makes a server stream something: 5 control tokens, 256 bytes, and words of two and four letters.
"""

import argparse
import itertools
import json
import string
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.config import ModelConfig
from model.plan import plan
from model.safetensors_file import write_file
from model.tokenizer import byte_alphabet

VOCABULARY, STD = 32000, 0.02
CONTROL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜User｜>", "<｜Assistant｜>")
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "attention_bias": False, "tie_word_embeddings": False, "max_position_embeddings": 4096, "rope_theta": 10000.0,
    "num_hidden_layers": 10, "num_attention_heads": 8, "num_key_value_heads": 8, "torch_dtype": "float32",
}  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "v2": COMMON | {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 768,
        "intermediate_size": 2048, "moe_intermediate_size": 384, "n_routed_experts": 16, "num_experts_per_tok": 4,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1,
        "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
        "q_lora_rank": 384, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
    "llama": COMMON | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816,
        "mlp_bias": False,
    },
}  # fmt: skip


def write_checkpoint(directory: Path, preset: str, layers: int | None = None) -> int:
    """A hub directory with weights, config and tokenizer; the number of its parameters."""
    hub = PRESETS[preset] | ({} if layers is None else {"num_hidden_layers": layers})
    params = plan(ModelConfig.from_hub(hub), np.float32)[1]
    float32 = np.dtype(np.float32)
    listing = [(name, param.tensor_shape, float32) for param in params for name in param.names]
    directory.mkdir(parents=True, exist_ok=True)
    write_file(directory / "model.safetensors", listing, (_draw(name, shape) for name, shape, _ in listing))
    files = {
        "config.json": hub,
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1},
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True,
                                  "bos_token": CONTROL[0], "eos_token": CONTROL[1], "pad_token": CONTROL[2]},
    }  # fmt: skip
    for name, value in files.items():
        (directory / name).write_text(json.dumps(value, ensure_ascii=False) + "\n", "utf-8")
    return sum(int(np.prod(shape)) for _, shape, _ in listing)


def _draw(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    rng = np.random.Generator(np.random.Philox(zlib.crc32(name.encode())))
    return rng.standard_normal(shape, np.float32) * np.float32(STD)


def _merges() -> Iterator[tuple[str, ...]]:
    pairs = list(itertools.product(string.ascii_lowercase, repeat=2))
    yield from pairs
    words = ["".join(pair) for pair in pairs]
    yield from itertools.product(words, words)


def _tokenizer() -> dict[str, Any]:
    """tokenizer.json of a byte-level vocabulary with VOCABULARY tokens."""
    alphabet = [*CONTROL, *byte_alphabet()]
    merges = list(itertools.islice(_merges(), VOCABULARY - len(alphabet)))
    tokens = [*alphabet, *("".join(merge) for merge in merges)]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": i, "content": token, **plain} for i, token in enumerate(CONTROL)],
        "pre_tokenizer": level, "decoder": level,
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges},
    }  # fmt: skip


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("preset", choices=sorted(PRESETS))
    options.add_argument("directory", type=Path, metavar="DIR")
    options.add_argument("--layers", type=int, help="fewer, for a quick try (default: the preset's 10)")
    args = options.parse_args()
    count = write_checkpoint(args.directory, args.preset, args.layers)
    print(f"{args.directory}: {count / 1e6:.0f} M parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())

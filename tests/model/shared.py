"""Paths and small models that several tests of the model share."""

import json
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[1] / "golden"
VARIANTS = ("llm_7b", "coder_linear_rope", "moe_16b", "v2_lite", "v2", "v3", "v3_bf16", "v3_fp8",
            "r1_distill_qwen", "r1_distill_llama", "llama_tied", "v2_noyarn")  # fmt: skip


def hub_config(name: str, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((GOLDEN / name / "config.json").read_text())
    return config | changes

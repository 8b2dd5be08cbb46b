"""Resident memory while a checkpoint loads: python -m scripts.bench_load [--megabytes 1000] [--dtype bfloat16]

Writes a synthetic DeepSeek-V3-form checkpoint of the given size, loads it in a process of its own and compares the
resident peak above what the imports take with the floor: the model in its final layout and dtype plus twice its
largest final parameter.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from model.checkpoint import load_hub
from model.config import ModelConfig
from model.plan import plan
from model.safetensors_file import write_file
from scripts.report import finish, parser

HUB: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 1024, "intermediate_size": 4096, "moe_intermediate_size": 512,
    "n_routed_experts": 32, "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1, "num_attention_heads": 16, "kv_lora_rank": 256, "q_lora_rank": 512,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "vocab_size": 16000,
    "max_position_embeddings": 4096, "num_nextn_predict_layers": 0, "routed_scaling_factor": 2.5,
}  # fmt: skip
LAYER_MB = {"float32": 211, "bfloat16": 105}


def write_checkpoint(directory: Path, megabytes: int, dtype: str) -> None:
    """About `megabytes` of random tensors in hub form."""
    hub = HUB | {"num_hidden_layers": max(2, -(-megabytes // LAYER_MB[dtype])), "torch_dtype": dtype}
    (directory / "config.json").write_text(json.dumps(hub))
    stored = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    rng = np.random.default_rng(0)
    listing = [
        (name, param.tensor_shape, np.dtype(np.float32) if "gate" in param.path else stored)
        for param in plan(ModelConfig.from_hub(hub), jnp.float32)[1]
        for name in param.names
    ]
    data = (rng.standard_normal(shape, np.float32).astype(kind) for _, shape, kind in listing)
    write_file(directory / "model.safetensors", listing, data)


def resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (the most so far) of this process, from the Linux kernel."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(field + ":"))) * 1024


def measure(directory: Path) -> dict[str, Any]:
    """In this process: load, and say what it took."""
    params = plan(ModelConfig.load(directory), jnp.float32)[1]
    jnp.zeros(1).block_until_ready()
    before = resident_bytes("VmRSS")
    model = load_hub(directory, dtype=jnp.float32)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    largest = max(int(np.prod(param.shape)) * param.dtype.itemsize for param in params)
    return {
        "file_mb": (directory / "model.safetensors").stat().st_size / 1e6,
        "model_mb": total / 1e6,
        "largest_mb": largest / 1e6,
        "peak_mb": (resident_bytes("VmHWM") - before) / 1e6,
        "allowed_mb": (total + 2 * largest) / 1e6,
    }


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--megabytes", type=int, default=1000, help="size of the checkpoint (default %(default)s)")
    options.add_argument("--dtype", choices=sorted(LAYER_MB), default="float32", help="of the file; loaded as float32")
    options.add_argument(
        "--measure", type=Path, help="load this directory and print what it took (used by the script itself)"
    )
    args = options.parse_args()
    if args.measure is not None:
        print(json.dumps(measure(args.measure)))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        write_checkpoint(Path(temporary), args.megabytes, args.dtype)
        command = [sys.executable, "-m", "scripts.bench_load", "--measure", temporary]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    row = json.loads(done.stdout)
    figure = f"peak {row['peak_mb']:.0f} MB of {row['allowed_mb']:.0f} MB allowed"
    return finish([row], figure, ok=row["peak_mb"] <= row["allowed_mb"], as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())

"""Compile time of a very deep model's bucket: python -m scripts.bench_compile [--layers 61]

Traces and compiles one decode and one extend bucket of a toy DeepSeek-V3 with 4 and with --layers layers, cold cache.
Floor: the deep one takes at most 120 s and at most 15 times the 4-layer one's time.
"""

import sys
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from model.cache import init_cache
from model.config import ModelConfig
from model.sampling import Sampling
from model.steps import DeviceState, StepInput, decode_step, extend_step
from model.transformer import Transformer
from scripts.report import finish, parser

MAX_SECONDS, MAX_RATIO, ROWS, PAGES, PAGE = 120.0, 15.0, 16, 16, 16
HUB: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 48, "intermediate_size": 80, "moe_intermediate_size": 16,
    "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 3, "num_attention_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 40,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "vocab_size": 256,
    "max_position_embeddings": 4096, "routed_scaling_factor": 2.5,
}  # fmt: skip


def batch_shapes(tokens: int) -> StepInput:
    """Abstract arrays of one bucket."""

    def of(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    ints, floats, flag = partial(of, jnp.int32), partial(of, jnp.float32), of(jnp.bool_)
    sampling = Sampling(floats(ROWS), ints(ROWS), floats(ROWS), floats(ROWS), of(jnp.uint32, ROWS, 2))
    rows = ints(ROWS)
    return StepInput(
        ints(ROWS, tokens), rows, rows, rows, ints(ROWS, PAGES), rows, ints(ROWS, 16), sampling, flag, flag
    )


def seconds(layers: int, step: Any, tokens: int) -> tuple[float, float]:
    """(trace and lower, compile) of one bucket."""
    model = Transformer(ModelConfig.from_hub(HUB | {"num_hidden_layers": layers}), rngs=nnx.Rngs(0))
    graph, params = nnx.split(model)
    pools = init_cache(model.config, 1 + ROWS * PAGES, PAGE, jnp.float32)
    state = DeviceState(pools, jnp.zeros((ROWS + 1,), jnp.int32))
    run = jax.jit(lambda p, s, b: step(nnx.merge(graph, p), s, b, num_top=20), donate_argnums=(1,))
    start = time.perf_counter()
    lowered = run.lower(params, state, batch_shapes(tokens))
    middle = time.perf_counter()
    lowered.compile()
    return middle - start, time.perf_counter() - middle


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=61, help="depth of the deep model (default %(default)s)")
    args = options.parse_args()
    rows, worst_s, worst_ratio = [], 0.0, 0.0
    for name, step, tokens in (("decode", decode_step, 1), ("extend", extend_step, 128)):
        totals = []
        for layers in (4, args.layers):
            lower_s, compile_s = seconds(layers, step, tokens)
            totals.append(lower_s + compile_s)
            rows.append({"bucket": name, "layers": layers, "lower_s": lower_s, "compile_s": compile_s})
        worst_s, worst_ratio = max(worst_s, totals[1]), max(worst_ratio, totals[1] / totals[0])
    figure = f"{args.layers} layers: {worst_s:.1f} s a bucket, {worst_ratio:.1f} x the 4-layer one"
    ok = worst_s <= MAX_SECONDS and worst_ratio <= MAX_RATIO
    return finish(rows, figure, ok=ok, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())

"""The routers against the published rules, written as float64 loops."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.architecture import MoeConfig
from model.moe import Router


def route64(config, logits, bias):
    """One token: {expert: weight}."""
    if config.scoring == "softmax":
        p = np.exp(logits - logits.max())
        p /= p.sum()
    else:
        p = 1 / (1 + np.exp(-logits))
    choice = p + bias
    size = config.num_experts // config.num_groups
    if config.num_groups > 1:
        groups = choice.reshape(config.num_groups, size)
        score = np.sort(groups)[:, -2:].sum(-1) if config.selection == "noaux_tc" else groups.max(-1)
        kept = np.argsort(-score, kind="stable")[: config.topk_groups]
        outside = np.array([e // size not in kept for e in range(config.num_experts)])
        choice = np.where(outside, -np.inf if config.selection == "noaux_tc" else 0.0, choice)
    chosen = np.argsort(-choice, kind="stable")[: config.top_k]
    weights = p[chosen]
    if config.normalise:
        weights = weights / weights.sum()
    return dict(zip(chosen.tolist(), (weights * config.scale).tolist(), strict=True))


FORMS = {
    "moe_16b": MoeConfig(10, 3, 4, 0, "softmax", "greedy", 1, 1, False, 1.0),
    "v2": MoeConfig(12, 3, 4, 0, "softmax", "group_limited_greedy", 4, 2, False, 16.0),
    "v3": MoeConfig(12, 4, 4, 0, "sigmoid", "noaux_tc", 4, 2, True, 2.5),
    "v3 one expert a group": MoeConfig(6, 2, 4, 0, "sigmoid", "noaux_tc", 6, 3, True, 1.0),
    "v3 one group": MoeConfig(6, 2, 4, 0, "sigmoid", "noaux_tc", 1, 1, True, 1.0),
}


@pytest.mark.parametrize("form", FORMS)
def test_router_equals_the_rule(form):
    config, rng = FORMS[form], np.random.default_rng(3)
    router = Router(config, 8, rngs=nnx.Rngs(0))
    bias = np.zeros(config.num_experts)
    if config.selection == "noaux_tc":
        bias = rng.normal(-0.6, 0.4, config.num_experts).astype(np.float32)  # mostly negative: -inf is not 0
        router.e_score_correction_bias[...] = jnp.asarray(bias)
    x = rng.standard_normal((64, 8), np.float32)
    experts, weights = router(jnp.asarray(x))
    logits = x.astype(np.float64) @ np.asarray(router.weight(), np.float64).T
    for n in range(64):
        want = route64(config, logits[n], bias)
        got = dict(zip(np.asarray(experts)[n].tolist(), np.asarray(weights)[n].tolist(), strict=True))
        assert got.keys() == want.keys()
        for expert, weight in want.items():
            assert got[expert] == pytest.approx(weight, rel=1e-4)

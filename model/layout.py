"""How weights lie in memory: chosen once, for the device that will compute, after they are loaded in the hub's layout.

On a CPU the experts' down projections lie side by side, so that a decode step multiplies by all of them at once instead
of copying each out of its stack (kernels_pallas/grouped_matmul.py). For serving in the fast arithmetic: the
deterministic one has no such step, and a model that is trained, saved or sharded keeps the hub's layout.
"""

from kernels_pallas.grouped_matmul import prefers_joined

from .layers import JoinedLinear, StackedLinear
from .moe import MixtureOfExperts
from .transformer import Transformer


def lay_out(model: Transformer) -> None:
    """For this process's device; the same numbers, to rounding. One layer's copy exists beside the model meanwhile."""
    for layer in (*model.layers, *model.mtp):
        if not isinstance(layer.mlp, MixtureOfExperts):
            continue
        experts = layer.mlp.experts
        if isinstance(experts.down_proj, StackedLinear) and prefers_joined(experts.gate_proj.weight()):
            experts.down_proj = JoinedLinear(experts.down_proj)

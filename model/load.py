"""`load_model`: the one door to a model's weights, whatever form they are stored in."""

from pathlib import Path

from jax.sharding import Mesh
from jax.typing import DTypeLike

from .checkpoint import Progress, load_hub
from .converted import is_converted, load_converted
from .transformer import Transformer


def load_model(
    directory: Path | str,
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    ignore: tuple[str, ...] = (),
    strict_mesh: bool = False,
    progress: Progress | None = None,
) -> Transformer:
    """A hub directory (config.json and safetensors) or one that `tidegate convert` wrote; both give the same logits.

    `dtype` None: for a hub directory float32 on a CPU and the stored dtype elsewhere, for a converted one as converted.
    `ignore`: glob patterns of extra hub tensors to leave out. `strict_mesh`: refuse a dimension that the mesh does not
    divide. Raises CheckpointError with all problems at once, UnsupportedModel, FileNotFoundError.
    """
    root = Path(directory)
    if is_converted(root):
        return load_converted(root, dtype=dtype, mesh=mesh, strict_mesh=strict_mesh)
    return load_hub(root, dtype=dtype, mesh=mesh, ignore=ignore, strict_mesh=strict_mesh, progress=progress)

"""Compiles for one GPU that is not there, a process of its own: python -m scripts.aot_compile TARGET DIRECTORY NAME...

XLA's whole pipeline, through ptxas, for a described device. One target a process: in one that has compiled a Mosaic
kernel for sm_90a, sm_80 seems to take it too. DIRECTORY/<case> gets what the compilers dump; their log goes to stderr,
each case's behind a line with its name; stdout has an object {"case", "seconds", "error"} of each case that it is
through with. Needs the environment of make aot.
"""

import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from scripts.aot_cases import CASES, Case

LOG_MARK = "=== case "


def environment() -> dict[str, str]:
    """For this process. Exits where the CUDA compiler of PyPI is not installed: one that happens to be on the machine
    may be of any version, and only Mosaic's route would find it."""
    try:
        found = find_spec("nvidia.cu13")
    except ModuleNotFoundError:
        found = None
    if found is None or not found.submodule_search_locations:
        sys.exit("nvidia-cuda-nvcc is not installed for this Python; run make aot, or .venv-aot/bin/python")
    root = found.submodule_search_locations[0]
    return {
        "JAX_PLATFORMS": "cpu",
        "CUDA_ROOT": root,
        "PATH": os.pathsep.join((f"{root}/bin", os.environ["PATH"])),  # where Mosaic looks for ptxas
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "TF_CPP_VMODULE": "subprocess_compilation=2",  # says in the log what ptxas said
    }


class Gpu(NamedTuple):
    """What XLA asks a device about itself."""

    name: str
    major: int
    features: str
    cores: int
    fpus_per_core: int
    shared_per_core: int  # bytes
    shared_per_block: int
    memory: int
    cache: int
    bandwidth: int  # bytes a second
    clock_ghz: float

    @property
    def config(self) -> str:
        """A GpuTargetConfigProto."""
        return f"""gpu_device_info {{
            name: "{self.name}" core_count: {self.cores} fpus_per_core: {self.fpus_per_core}
            cuda_compute_capability {{ major: {self.major} minor: 0 feature_extension: {self.features} }}
            threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
            thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
            block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
            registers_per_core_limit: 65536 registers_per_block_limit: 65536
            shared_memory_per_block: 49152 shared_memory_per_block_optin: {self.shared_per_block}
            shared_memory_per_core: {self.shared_per_core} l2_cache_size: {self.cache}
            device_memory_size: {self.memory} memory_bandwidth: {self.bandwidth} clock_rate_ghz: {self.clock_ghz}
            device_address_bits: 64 driver_version: "13.0.0" runtime_version: "12.8.0"
            compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0" }}
        platform_name: "CUDA" device_description_str: "{self.name}"
        dnn_version_info {{ major: 9 minor: 10 patch: 0 }}"""


GPUS = {
    "sm_90a": Gpu(
        "NVIDIA H200", 9, "ACCELERATED_FEATURES", 132, 128, 233472, 232448, 151397597184, 52428800, 4800000000000, 1.98
    ),
    "sm_80": Gpu(
        "NVIDIA A100-SXM4-80GB", 8, "NONE", 108, 64, 167936, 166912, 85100068864, 41943040, 2039040000000, 1.41
    ),
}


def mesh_of(gpu: Gpu) -> Any:
    """Of one device."""
    shape = "1x1x1"
    topology = topologies.get_topology_desc(shape, "cuda", topology=shape, target_config=gpu.config)
    return topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("x",))


def compile_case(case: Case, mesh: Any, directory: Path) -> None:
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(directory)
    options = {
        "xla_dump_to": str(directory),
        "xla_dump_emitter_re": "ptx",
        "xla_gpu_ptx_compiler_extra_flags": "-v",  # of ptxas: registers and spills
    }
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for x in case.args]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(case.run).trace(*args).lower()
    lowered.compile(compiler_options=options)


def attempt(case: Case, mesh: Any, directory: Path) -> str | None:
    """The error, if any: whatever a compiler raises is its word on the case."""
    directory.mkdir(parents=True)
    try:
        compile_case(case, mesh, directory)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def main(target: str, directory: str, *names: str) -> int:
    mesh, failed = mesh_of(GPUS[target]), 0
    for case in CASES:
        if case.name not in names:
            continue
        print(f"{LOG_MARK}{case.name}", file=sys.stderr, flush=True)
        start = time.perf_counter()
        error = attempt(case, mesh, Path(directory) / case.name)
        failed += error is not None
        seconds = time.perf_counter() - start
        print(json.dumps({"case": case.name, "seconds": seconds, "error": error}), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

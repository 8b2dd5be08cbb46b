"""`tidegate check DIR...`: does this build reproduce a model's reference outputs?

A directory holds config.json, safetensors and expected.npz (input_ids, lengths, logits, logprobs, greedy, and
mtp_logits where the model has an MTP layer). Logits come from the full forward; greedy continuations and a second
reading of the log-probabilities come from the served path, chunked prefill and paged decode, with the very step
functions that the server compiles. Everything is float32 at the highest matmul precision.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from numpy.typing import NDArray

from .cache import init_cache
from .config import ModelConfig, UnsupportedModel
from .expected import read_expected
from .load import load_model
from .plan import mesh_problems, plan
from .sampling import Sampling
from .sharding import make_mesh, named, parse_mesh
from .steps import DeviceState, StepInput, StepOutputs, decode_step, extend_step
from .transformer import Transformer

TOLERANCE = {"logits": 2e-4, "logprobs": 1e-4, "mtp_logits": 2e-4}
CHUNK, PAGE = 16, 8
EXIT_OK, EXIT_WRONG, EXIT_UNSUPPORTED = 0, 1, 3


@dataclass(frozen=True, slots=True)
class Result:
    """One variant's row of the report; an error that was not measured is None."""

    variant: str
    status: Literal["ok", "wrong", "unsupported"]
    max_err: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(TOLERANCE))
    greedy_equal: bool | None = None
    error: str | None = None


class ServedPath:
    """Chunked prefill and paged decode of a whole batch, each compiled once."""

    def __init__(self, model: Transformer, rows: int, max_length: int, mesh: Mesh | None) -> None:
        graph, self._params = nnx.split(model)
        self._rows, self._mesh = rows, mesh
        self._num_pages = math.ceil(max_length / PAGE)
        pools = init_cache(model.config, 1 + rows * self._num_pages, PAGE, jnp.dtype(jnp.float32))
        self._state = DeviceState(pools, jnp.zeros((rows + 1,), jnp.int32))
        own = 1 + np.arange(rows * self._num_pages, dtype=np.int32).reshape(rows, -1)
        self._table, self._slots = own, np.arange(1, rows + 1, dtype=np.int32)

        def run(step: Any, params: Any, state: DeviceState, batch: StepInput) -> tuple[DeviceState, StepOutputs]:
            out: tuple[DeviceState, StepOutputs] = step(nnx.merge(graph, params), state, batch, num_top=1)
            return out

        self._extend = jax.jit(partial(run, extend_step), donate_argnums=(1,))
        self._decode = jax.jit(partial(run, decode_step), donate_argnums=(1,))

    def prefill(self, ids: NDArray[Any], lengths: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """(log-probabilities [b, t] with 0 at position 0, first greedy token [b])."""
        longest = int(lengths.max())
        logprobs = np.zeros((self._rows, longest + CHUNK + 1), np.float32)
        first = np.zeros((self._rows,), np.int32)
        padded = np.pad(ids, ((0, 0), (0, CHUNK + 1)))
        for start in range(0, longest, CHUNK):
            count = np.clip(lengths - start, 0, CHUNK)
            ends = (count > 0) & (start + count == lengths)
            following = np.where(ends, 0, padded[:, start + CHUNK])
            out = self._step(self._extend, padded[:, start : start + CHUNK], following, start, count, ends)
            inside = np.arange(CHUNK)[None, :] < np.where(ends, count - 1, count)[:, None]
            logprobs[:, start + 1 : start + CHUNK + 1] += np.where(inside, np.asarray(out.prompt_logprobs), 0)
            first = np.where(ends, np.asarray(out.token), first)
        return logprobs[:, :longest], first

    def decode(self, positions: NDArray[Any]) -> NDArray[Any]:
        """Feed each row's last token at `positions`; the next greedy token [b]."""
        ones = np.ones((self._rows,), np.int32)
        tokens = np.zeros((self._rows, 1), np.int32)
        out = self._step(self._decode, tokens, ones, positions, ones, ones.astype(bool))
        return np.asarray(out.token)

    def _step(
        self,
        step: Any,
        tokens: NDArray[Any],
        following: NDArray[Any],
        start: Any,
        count: NDArray[Any],
        ends: NDArray[Any],
    ) -> StepOutputs:
        zeros = np.zeros((self._rows,), np.float32)
        greedy: dict[str, Any] = {
            "temperature": zeros,
            "top_k": zeros.astype(np.int32),
            "top_p": zeros + 1,
            "min_p": zeros,
            "seed": np.zeros((self._rows, 2), np.uint32),
        }
        arrays: dict[str, Any] = {
            "tokens": tokens.astype(np.int32),
            "next_token": following.astype(np.int32),
            "start": np.broadcast_to(np.asarray(start, np.int32), (self._rows,)),
            "length": count.astype(np.int32),
            "page_table": self._table,
            "slot": np.where(ends, self._slots, 0),
            "targets": np.zeros((self._rows, 1), np.int32),
            "want_top": np.asarray(False),
            "want_prompt": np.asarray(True),
        }
        batch = StepInput(sampling=Sampling(**greedy), **arrays)
        self._state, out = step(self._params, self._state, place(batch, self._mesh))
        return out


def place(batch: Any, mesh: Mesh | None) -> Any:
    """Host arrays of a batch onto the devices: rows over the data axis where they divide."""
    if mesh is None:
        return jax.tree.map(jax.device_put, batch)

    def put(array: NDArray[Any]) -> jax.Array:
        axes = ("batch",) + (None,) * (array.ndim - 1) if array.ndim else ()
        return jax.device_put(array, named(mesh, axes, array.shape))

    return jax.tree.map(put, batch)


def _full_forward(model: Transformer, ids: NDArray[Any], mesh: Mesh | None) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Logits [b, t, v] and, with an MTP layer, its logits [b, t-1, v]."""
    graph, params = nnx.split(model)
    with_mtp = bool(model.config.num_mtp_layers) and ids.shape[1] > 1

    @jax.jit
    def run(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        merged: Transformer = nnx.merge(graph, params)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden = merged.hidden(tokens, positions)
        mtp = merged.mtp_logits(hidden[:, :-1], tokens[:, 1:]) if with_mtp else None
        return merged.logits(hidden), mtp

    logits, mtp = run(params, place(ids.astype(np.int32), mesh))
    return np.asarray(logits), None if mtp is None else np.asarray(mtp)


def _chosen_logprobs(logits: NDArray[Any], ids: NDArray[Any]) -> NDArray[Any]:
    """log p(ids[b, t] given those before), 0 at t = 0; in float64."""
    wide = logits[:, :-1].astype(np.float64)
    peak = wide.max(-1, keepdims=True)
    norm = np.log(np.exp(wide - peak).sum(-1)) + peak[..., 0]
    chosen = np.take_along_axis(wide, ids[:, 1:, None], axis=-1)[..., 0] - norm
    return np.pad(chosen, ((0, 0), (1, 0)))


def _largest(got: NDArray[Any], want: NDArray[Any], mask: NDArray[np.bool_]) -> float:
    if not mask.any():
        return 0.0
    worst = float(np.abs(got.astype(np.float64) - want)[mask].max())
    return math.inf if math.isnan(worst) else worst


def _greedy(path: ServedPath, first: NDArray[Any], lengths: NDArray[Any], count: int) -> NDArray[Any]:
    tokens = [first]
    for step in range(count - 1):
        tokens.append(path.decode((lengths + step).astype(np.int32)))
    return np.stack(tokens, axis=1)


def measure(directory: Path, mesh: Mesh | None, attention: str) -> Result:
    """Compare one variant. Raises what loading raises."""
    config = ModelConfig.load(directory)  # an architecture that is not supported is said first
    model = load_model(directory, dtype=jnp.dtype(jnp.float32), mesh=mesh)
    if attention != "auto":
        model.arithmetic = replace(model.arithmetic, attention_impl=attention)
    expected = read_expected(directory / "expected.npz", config.vocab_size)
    ids, lengths = expected["input_ids"], expected["lengths"]
    mask = np.arange(ids.shape[1])[None, :] < lengths[:, None]
    logits, mtp = _full_forward(model, ids, mesh)
    path = ServedPath(model, len(ids), int(lengths.max()) + expected["greedy"].shape[1], mesh)
    served, first = path.prefill(ids, lengths)
    errors: dict[str, float | None] = dict.fromkeys(TOLERANCE)
    errors["logits"] = _largest(logits, expected["logits"], mask)
    full = _largest(_chosen_logprobs(logits, ids), expected["logprobs"], mask)
    errors["logprobs"] = max(
        full, _largest(served, expected["logprobs"][:, : served.shape[1]], mask[:, : served.shape[1]])
    )
    if "mtp_logits" in expected:
        if mtp is None and ids.shape[1] > 1:
            return Result(directory.name, "wrong", errors, error="expected.npz has mtp_logits, the config no MTP layer")
        if mtp is not None:
            errors["mtp_logits"] = _largest(mtp, expected["mtp_logits"][:, :-1], mask[:, 1:])
    greedy_equal = np.array_equal(_greedy(path, first, lengths, expected["greedy"].shape[1]), expected["greedy"])
    worse = [f"{name} is off by {err:.2e}" for name, err in errors.items() if err is not None and err > TOLERANCE[name]]
    if not greedy_equal:
        worse.append("greedy continuations differ")
    return Result(directory.name, "wrong" if worse else "ok", errors, greedy_equal, "; ".join(worse) or None)


def check_one(directory: Path, mesh: Mesh | None, attention: str = "auto") -> Result:
    """measure(), with what a bad directory raises turned into its row. `attention`: kernels_pallas.dispatch's `impl`,
    "auto" for what the model is served with."""
    try:
        with jax.default_matmul_precision("highest"):
            return measure(directory, mesh, attention)
    except UnsupportedModel as error:
        return Result(directory.name, "unsupported", error=str(error))
    except (ValueError, OSError, KeyError) as error:
        return Result(directory.name, "wrong", error=str(error))


def run(directories: Sequence[Path | str], *, as_json: bool = False, mesh: str = "", attention: str = "auto") -> int:
    """Check each directory, print the report, return the exit code: 0 ok, 1 wrong, 3 only unsupported."""
    devices = make_mesh(parse_mesh(mesh)) if mesh else None
    results = []
    for directory in (Path(name).absolute() for name in directories):
        if devices is not None:
            _warn_unshardable(directory, devices)
        results.append(check_one(directory, devices, attention))
        if not as_json:
            _print_row(results[-1])
    if as_json:
        _emit(json.dumps([_row(result) for result in results], indent=1))
    else:
        _emit(f"{sum(r.status == 'ok' for r in results)} of {len(results)} variants ok")
    statuses = {result.status for result in results}
    return EXIT_WRONG if "wrong" in statuses else EXIT_UNSUPPORTED if "unsupported" in statuses else EXIT_OK


def _row(result: Result) -> dict[str, Any]:
    """JSON has no infinity: an error that is not finite becomes null, and `error` says so."""
    row = asdict(result)
    row["max_err"] = {k: v if v is not None and math.isfinite(v) else None for k, v in result.max_err.items()}
    return row


def _warn_unshardable(directory: Path, mesh: Mesh) -> None:
    try:
        params = plan(ModelConfig.load(directory), jnp.dtype(jnp.float32))[1]
    except (ValueError, OSError):
        return  # check_one reports it
    for line in mesh_problems(params, mesh):
        print(f"warning: {directory.name}: {line}; it is replicated", file=sys.stderr)  # noqa: T201


def _print_row(result: Result) -> None:
    errors = "  ".join(f"{name} {'-' if err is None else f'{err:.1e}'}" for name, err in result.max_err.items())
    greedy = {None: "-", True: "equal", False: "DIFFERS"}[result.greedy_equal]
    _emit(
        f"{result.variant:<20} {result.status:<11} {errors}  greedy {greedy}"
        + (f"  {result.error}" if result.error else "")
    )


def _emit(line: str) -> None:
    print(line, flush=True)  # noqa: T201

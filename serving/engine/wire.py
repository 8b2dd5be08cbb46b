"""A batch as one array, so that a step costs one transfer to the device and its small results one back.

All fields of a row stand side by side in an int32 matrix [rows, width]; floats and seeds keep their bits. `pack` runs
on the host, `unpack` inside the compiled step; both walk the same list of fields, so they cannot disagree. The same
for the outputs that every step has.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from model.adjust import Adjust
from model.sampling import Sampling
from model.steps import StepInput, StepOutputs
from serving.batch import NUM_TARGETS, Batch, Bucket

_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_SCALAR_FIELDS = ("start", "length", "next_token", "slot", "top_k", "table", *_FLOATS)
_FLAGS = ("want_top", "want_prompt")
_TOKEN, _LOGPROB, _BITS, _FIRST_TARGET = range(4)
_FINITE, _DRAFTED, _ACCEPTED = 1, 2, 4


def _fields(bucket: Bucket) -> list[tuple[str, int]]:
    """(name, columns), in order."""
    wide = [("tokens", bucket.tokens), ("page_table", bucket.pages), ("targets", NUM_TARGETS), ("seed", 2)]
    return [*wide, *((name, 1) for name in (*_SCALAR_FIELDS, *_FLAGS))]


def packed_shape(bucket: Bucket) -> tuple[int, int]:
    return bucket.rows, sum(columns for _, columns in _fields(bucket))


def pack(batch: Batch) -> NDArray[np.int32]:
    """[rows, width]"""
    out = np.empty(packed_shape(batch.bucket), np.int32)
    at = 0
    for name, columns in _fields(batch.bucket):
        value = getattr(batch, name)
        if value.dtype.itemsize == 4:
            value = value.view(np.int32)
        out[:, at : at + columns] = value if value.ndim != 1 else value[:, None]
        at += columns
    return out


def unpack(packed: jax.Array, bucket: Bucket) -> StepInput:
    """The inverse of `pack`, on the device."""
    values: dict[str, Any] = {}
    at = 0
    for name, columns in _fields(bucket):
        values[name] = (
            packed[:, at : at + columns] if columns != 1 or name in ("tokens", "page_table") else packed[:, at]
        )
        at += columns
    for name in _FLOATS:
        values[name] = lax.bitcast_convert_type(values[name], jnp.float32)
    for name in _FLAGS:
        values[name] = (values[name] != 0).any()
    values["seed"] = lax.bitcast_convert_type(values["seed"], jnp.uint32)
    sampling = Sampling(**{name: values.pop(name) for name in Sampling._fields})
    adjust = Adjust(**{name: values.pop(name) for name in Adjust._fields})
    return StepInput(sampling=sampling, adjust=adjust, **values)


def pack_outputs(out: StepOutputs) -> jax.Array:
    """[rows, 3 + NUM_TARGETS]: what every step reports."""
    bits = out.finite * _FINITE
    if out.drafted is not None and out.accepted is not None:
        bits += out.drafted * _DRAFTED + out.accepted * _ACCEPTED
    columns = [
        out.token[:, None],
        lax.bitcast_convert_type(out.logprob, jnp.int32)[:, None],
        bits.astype(jnp.int32)[:, None],
        lax.bitcast_convert_type(out.target_logprobs, jnp.int32),
    ]
    return jnp.concatenate(columns, axis=1)


def unpack_outputs(packed: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
    """token, logprob, finite, target_logprobs, drafted and accepted of serving.batch.StepOutput."""
    bits = packed[:, _BITS]
    return {
        "token": packed[:, _TOKEN],
        "logprob": np.ascontiguousarray(packed[:, _LOGPROB]).view(np.float32),
        "finite": bits & _FINITE != 0,
        "drafted": bits & _DRAFTED != 0,
        "accepted": bits & _ACCEPTED != 0,
        "target_logprobs": np.ascontiguousarray(packed[:, _FIRST_TARGET:]).view(np.float32),
    }

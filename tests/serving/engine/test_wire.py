"""A batch survives the way to the device bit by bit, and so do the outputs that every step has."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from model.steps import StepOutputs
from serving.batch import NUM_TARGETS, Batch, Bucket, Kind
from serving.engine.wire import pack, pack_outputs, packed_shape, unpack, unpack_outputs

BUCKETS = [Bucket(Kind.SCORE, 2, 5, 0), Bucket(Kind.EXTEND, 3, 4, 6), Bucket(Kind.DECODE, 1, 1, 1)]


def random_batch(bucket: Bucket, seed: int) -> Batch:
    rng = np.random.default_rng(seed)

    def ints(*shape: int) -> np.ndarray:
        return rng.integers(0, 2**31 - 1, shape, dtype=np.int32)

    def floats(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    b = bucket
    return Batch(
        bucket=b,
        tokens=ints(b.rows, b.tokens),
        start=ints(b.rows),
        length=ints(b.rows),
        next_token=ints(b.rows),
        page_table=ints(b.rows, b.pages),
        slot=ints(b.rows),
        targets=ints(b.rows, NUM_TARGETS),
        temperature=floats(b.rows),
        top_k=ints(b.rows),
        top_p=floats(b.rows),
        min_p=floats(b.rows),
        seed=rng.integers(0, 2**32, (b.rows, 2), dtype=np.uint32),
        table=ints(b.rows),
        repetition_penalty=floats(b.rows),
        presence_penalty=floats(b.rows),
        frequency_penalty=floats(b.rows),
        want_top=np.array(rng.random() < 0.5),
        want_prompt=np.array(rng.random() < 0.5),
    )


@pytest.mark.parametrize("bucket", BUCKETS)
@given(seed=st.integers(0, 1000))
def test_a_batch_comes_out_as_it_went_in(bucket: Bucket, seed: int) -> None:
    batch = random_batch(bucket, seed)
    packed = pack(batch)
    assert packed.shape == packed_shape(bucket)
    got = unpack(jnp.asarray(packed), bucket)
    for name in ("tokens", "start", "length", "next_token", "page_table", "slot", "targets", "want_top", "want_prompt"):
        assert np.array_equal(np.asarray(getattr(got, name)), getattr(batch, name)), name
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        value = np.asarray(getattr(got.sampling, name))
        assert value.dtype == getattr(batch, name).dtype
        assert np.array_equal(value, getattr(batch, name)), name
    for name in ("table", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert np.array_equal(np.asarray(getattr(got.adjust, name)), getattr(batch, name)), name


def test_outputs_come_out_as_they_went_in() -> None:
    rng = np.random.default_rng(0)
    floats = rng.standard_normal((3, NUM_TARGETS)).astype(np.float32)
    floats[0, 0] = -np.inf
    zeros = jnp.zeros((3, 1))
    out = StepOutputs(
        token=jnp.array([5, 2**31 - 1, 0]),
        logprob=jnp.asarray(floats[:, 1]),
        target_logprobs=jnp.asarray(floats),
        finite=jnp.array([True, False, True]),
        top_ids=zeros, top_logprobs=zeros, prompt_logprobs=zeros, prompt_top_ids=zeros, prompt_top_logprobs=zeros,
    )  # fmt: skip
    got = unpack_outputs(np.asarray(jax.jit(pack_outputs)(out)))
    assert got["token"].tolist() == [5, 2**31 - 1, 0]
    assert got["finite"].tolist() == [True, False, True]
    assert np.array_equal(got["logprob"], floats[:, 1])
    assert np.array_equal(got["target_logprobs"], floats)

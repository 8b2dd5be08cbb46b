"""Which form an op takes where."""

import jax
import pytest

from kernels_pallas.dispatch import kernel_options, resolve


@pytest.mark.parametrize(("backend", "form"), [("cpu", "xla"), ("tpu", "xla"), ("cuda", "pallas"), ("gpu", "pallas")])
def test_auto_is_the_kernel_on_a_gpu_and_xla_elsewhere(monkeypatch, backend, form):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert resolve("auto") == form
    assert [resolve(impl) for impl in ("xla", "pallas", "interpret")] == ["xla", "pallas", "interpret"]


def test_another_form_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'auto', 'xla', 'pallas' or 'interpret'"):
        resolve("triton")


def test_only_a_kernel_for_a_gpu_has_compiler_parameters():
    assert kernel_options("interpret", num_warps=4, num_stages=2) == {"interpret": True}
    params = kernel_options("pallas", num_warps=8, num_stages=3)["compiler_params"]
    assert (params.num_warps, params.num_stages) == (8, 3)

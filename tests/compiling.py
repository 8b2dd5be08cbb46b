"""How much XLA optimises the programs that tests compile."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def few_optimisations() -> Iterator[None]:
    """For the whole process. The same program, and what becomes of it in machine code takes half the time: for tests
    that run few steps, and assert nothing about bits of another compilation."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)

"""Array kernels: each op with a plain reference; imports only jax and numpy."""

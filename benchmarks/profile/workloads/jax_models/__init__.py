"""The workloads in JAX: some in plain JAX, most with flax.nnx; optimizers are optax's."""

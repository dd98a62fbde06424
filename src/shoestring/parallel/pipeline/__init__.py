"""Pipeline parallelism: ranks hold consecutive blocks of a model, and exchange activations and their gradients."""

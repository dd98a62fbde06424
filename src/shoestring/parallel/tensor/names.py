"""Names of the mesh axis and the facts of tensor parallelism; imports nothing."""

from typing import Final

TENSOR: Final = "tensor"
"""Mesh axis of the ranks that share layers; they work on the same samples."""
HELD_FACT: Final = "tensor.held"
"""Bytes of the weights that this rank holds."""
WHOLE_FACT: Final = "tensor.whole"
"""Bytes of the weights of the whole model."""
REDUCED_FACT: Final = "tensor.reduced"
"""Bytes of activations and their gradients that this rank has exchanged in training."""
WAITED_FACT: Final = "tensor.waited"
"""Seconds that this rank has spent on exchanging activations and gradients."""

"""What stands before the names of a recording's numbers among the facts of a run's trace."""

KIND_FACT = "memory of kind "
"""Before a kind: its bytes at the peak."""
TENSOR_FACT = "memory of tensor "
"""Before the name of a tensor: its bytes at the peak."""
NOTE_FACT = "memory note "
"""Before a sentence on memory that torch's allocators do not know."""

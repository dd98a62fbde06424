"""Prefixes of the keys under which recorded memory is stored in the facts of a run's trace."""

KIND_FACT = "memory of kind "
"""Prefix of the name of a kind; the value is the kind's bytes at the peak."""
TENSOR_FACT = "memory of tensor "
"""Prefix of a tensor's name; the value is the tensor's bytes at the peak."""
NOTE_FACT = "memory note "
"""Prefix of a sentence about memory outside torch's allocators; the value is 0."""

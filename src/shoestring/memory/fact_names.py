"""Prefixes of the keys under which recorded memory is stored in a run's trace, among the trace's `facts`."""

KIND_FACT = "memory of kind "
"""Prefix of keys that end with a kind of memory; the value is the kind's bytes at the peak."""
TENSOR_FACT = "memory of tensor "
"""Prefix of keys that end with a tensor's name; the value is the tensor's bytes at the peak."""
NOTE_FACT = "memory note "
"""Prefix of keys that end with a sentence about memory outside torch's allocators; the value is 0."""

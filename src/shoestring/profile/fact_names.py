"""Defines the key prefix of a profile's source lines in the facts of a run's trace."""

LINE_FACT = "line "
"""Prefix of keys such as `line train.py:12 loss.backward()`; the values are the line's seconds."""

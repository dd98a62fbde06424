"""Prefix of the keys under which a profile's lines are stored in the facts of a run's trace."""

LINE_FACT = "line "
"""Prefix of keys such as `line train.py:12 loss.backward()`; the values are the line's seconds."""

"""Prefix of the keys under which the times of source lines are stored in a run's trace, among the trace's `facts`."""

LINE_FACT = "line "
"""Prefix of keys such as `line train.py:12 loss.backward()`; the values are the line's seconds."""

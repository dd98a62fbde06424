"""The name of the mesh axis of split operators, and the keys of what a run reports about them; imports nothing."""

from typing import Final

OPERATORS: Final = "operators"
"""Mesh axis of the ranks that share the operators of a step; they work on the same samples. If a mesh has several such
axes, the later ones append a number to this name."""
HELD_FACT: Final = "operators.held"
"""Bytes of the weights that this rank holds."""
WHOLE_FACT: Final = "operators.whole"
"""Bytes of the weights of the whole model."""
SENT_FACT: Final = "operators.sent"
"""Bytes of the tensors that this rank has sent in training steps."""
WAITED_FACT: Final = "operators.waited"
"""Seconds for which this rank has waited for messages."""
PREDICTED_FACT: Final = "operators.predicted"
"""Predicted seconds of a step, without overlap of communication and computation."""
MESSAGES_FACT: Final = "operators.messages"
"""Number of messages per micro-batch."""

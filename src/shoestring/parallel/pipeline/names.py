"""Names of the pipeline's mesh axis and facts; imports nothing."""

from typing import Final

STAGE: Final = "stage"
"""Mesh axis of the pipeline stages; ranks along it work on the same samples."""
MESSAGES_FACT: Final = "pipeline.sent"
"""Bytes that this rank has sent to other stages in training steps."""
WAITED_FACT: Final = "pipeline.waited"
"""Seconds that this rank has waited for messages."""
WHOLE_FACT: Final = "pipeline.gradients"
"""Bytes of the gradients of the whole model."""

"""Ways to train one model on several ranks: replicas (DDP), shards (FSDP2), pipeline stages, or split layers."""

from shoestring.parallel.settings import DDP, FSDP, Pipeline, Planned, Tensor

__all__ = ["DDP", "FSDP", "Pipeline", "Planned", "Tensor"]

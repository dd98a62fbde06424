"""Several ranks train one model: replicas (DDP), shards (FSDP2), stages of a pipeline, or split layers."""

from shoestring.parallel.settings import DDP, FSDP, Pipeline, Planned, Tensor

__all__ = ["DDP", "FSDP", "Pipeline", "Planned", "Tensor"]

"""Several ranks train one model: replicas (DDP), shards (FSDP2), or stages of a pipeline."""

from shoestring.parallel.settings import DDP, FSDP, Pipeline

__all__ = ["DDP", "FSDP", "Pipeline"]

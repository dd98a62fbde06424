"""Data parallelism with torch's DDP (a replica on every rank) and FSDP2 (a shard on every rank)."""

from shoestring.parallel.settings import DDP, FSDP

__all__ = ["DDP", "FSDP"]

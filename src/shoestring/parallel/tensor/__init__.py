"""Layers that are split over the ranks of a host (tensor parallelism)."""

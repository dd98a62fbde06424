"""Generation from causal language models, with fewer and cheaper forward passes."""

from __future__ import annotations

from shoestring.decode.distill import Distill

__all__ = ["Distill"]

"""Compilation of the model by torch.compile."""

from shoestring.graph.settings import Compile

__all__ = ["Compile"]

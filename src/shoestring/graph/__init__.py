"""Graphs of whole steps: compilation by torch.compile, and operators that are split over ranks by a search."""

from shoestring.graph.settings import Compile, Split

__all__ = ["Compile", "Split"]

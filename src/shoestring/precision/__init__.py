"""Mixed precision: computes operations in a 16-bit type where 16 bits are accurate enough."""

from shoestring.precision.settings import Autocast, Graph

__all__ = ["Autocast", "Graph"]

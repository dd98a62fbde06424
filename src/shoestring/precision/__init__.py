"""Mixed precision: computes operations of the forward pass in a 16-bit type where 16 bits are accurate enough."""

from shoestring.precision.settings import Autocast

__all__ = ["Autocast"]

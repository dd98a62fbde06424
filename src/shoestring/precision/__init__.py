"""Mixed precision: operations of the forward pass for which 16 bits suffice are computed in a 16-bit type."""

from shoestring.precision.settings import Autocast

__all__ = ["Autocast"]

"""Pictures of one's own for `shoestring predict`: read and named as in the recipe `images`."""

from __future__ import annotations

from shoestring_recipes.images.files import name, read

__all__ = ["name", "read"]

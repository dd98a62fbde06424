"""Reads the user's own images for `shoestring predict` and names their classes, as the recipe `images` does."""

from __future__ import annotations

from shoestring_recipes.images.files import name, read

__all__ = ["name", "read"]

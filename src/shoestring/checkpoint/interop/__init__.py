"""Saves in the formats of other programs."""

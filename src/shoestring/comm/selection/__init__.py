"""Selects the layers that are compressed, and the layers that are sent in a step."""

"""Adapters of low rank beside the frozen layers of a model."""

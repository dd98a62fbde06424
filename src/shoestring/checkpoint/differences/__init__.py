"""Differential checkpoints: record the gradients that each step exchanged, and replay them on a full checkpoint."""

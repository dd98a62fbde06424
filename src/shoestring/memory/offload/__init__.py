"""Offloads optimizer state and activations to host memory."""

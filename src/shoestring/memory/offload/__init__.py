"""Offloading to host memory: optimizer state, and copies of gradients to the host and of weights to the device."""

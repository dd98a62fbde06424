"""Replicas that train on their own, and the outer optimizer that merges them."""

"""Local steps: replicas train independently, and an outer optimizer merges them."""

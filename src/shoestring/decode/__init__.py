"""Generation from causal language models: fewer forward passes for the same text."""

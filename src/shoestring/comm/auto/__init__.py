"""Chooses an exchange of gradients by measured cost."""

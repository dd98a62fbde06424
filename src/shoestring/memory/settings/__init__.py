"""Settings of the features of `memory`; importing this package does not import torch."""

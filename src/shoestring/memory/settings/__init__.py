"""Settings of the features of `memory`; importing them does not import torch."""

"""Settings of the optimizer features; these modules do not import torch."""

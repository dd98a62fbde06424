"""Settings of the features of `comm`. These modules do not import torch."""

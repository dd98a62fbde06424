"""Settings of generation and of the server. These modules do not import torch."""

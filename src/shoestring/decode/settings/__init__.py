"""Settings of generation, of the server and of the features of `decode`. These modules do not import torch."""

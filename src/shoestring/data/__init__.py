"""Corpora, tokenizers and the resumable loader.

`together.prepare` turns sources of text into token files, once for all ranks. `tokens.TokenDataset` reads these files,
and `loader.Loader` yields batches of their samples in an order that depends on the seed alone. `baselines` measures the
bits per byte of compressors and an n-gram model on the same held-out text. Importing this package imports neither torch
nor numpy.
"""

from shoestring.data.settings import BYTES, Data, ForClients

__all__ = ["BYTES", "Data", "ForClients"]

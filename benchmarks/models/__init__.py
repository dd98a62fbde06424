"""Models of others: what is promised for all causal models of transformers, over a zoo of tiny ones."""

"""Arguments of the verbs, and the printing of their results; importing these modules does not import torch."""

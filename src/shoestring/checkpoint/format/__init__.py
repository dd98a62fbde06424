"""File formats of checkpoints: part files, trees of state, checksums, manifests, and the history of a run."""

"""File formats of checkpoints: parts, trees of state, checksums, manifests, and the history of a run."""

"""The form of a checkpoint: parts, trees, checksums, manifests, and the history of a run."""

"""The form of a save: parts, trees, checksums, manifests, and the history of a run."""

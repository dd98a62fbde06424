"""Read and write checkpoints in the formats of other programs."""

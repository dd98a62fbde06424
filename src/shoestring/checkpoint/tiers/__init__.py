"""Writing checkpoints: own memory, another host's memory, and disk, each at its own interval."""

"""Finding the newest usable checkpoint and resuming from it."""

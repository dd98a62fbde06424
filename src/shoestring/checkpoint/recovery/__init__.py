"""Find the newest usable checkpoint, and resume from it."""

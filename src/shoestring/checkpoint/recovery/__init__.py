"""Finding the newest usable save and going on from it."""

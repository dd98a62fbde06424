"""Write checkpoints at three levels, each with its own interval: this host's memory, other hosts' memory, and disk."""

"""Write checkpoints to this host's memory, to other hosts' memory and to disk, each at an interval of its own."""

"""SharedHost memory divided among the processes of a host, which agree through files that each of them keeps locked."""

"""Start the ranks of a job, let them join a process group, and find out which ranks are lost after a failure."""

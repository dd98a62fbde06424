"""What there is, as measured, and what a choice would cost on it: Cluster, the simulator and Plan."""

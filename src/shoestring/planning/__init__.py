"""The hardware as measured (Cluster), and the predicted cost of a choice on it (the simulator, Decision)."""

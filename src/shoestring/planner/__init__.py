"""The planner: measures a model and a cluster, predicts how long a step takes each way to train it, and chooses."""

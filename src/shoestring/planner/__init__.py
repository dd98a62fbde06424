"""The planner: measures a model and a cluster, predicts the step time of each way to train, and chooses one."""

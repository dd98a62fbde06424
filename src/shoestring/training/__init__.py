"""The training loop, with the data, evaluations, metrics and run folder of a run."""

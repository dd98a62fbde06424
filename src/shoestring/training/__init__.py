"""The training loop of a run, with its data, evaluations, metrics and run folder."""

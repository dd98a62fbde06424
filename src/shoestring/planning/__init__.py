"""The measured hardware (`Cluster`), and predictions of step time on it (`simulate`, `choose`)."""

"""Measured speeds of the hardware (`Cluster`), and predictions of step time from them (`simulate`, `choose`)."""

"""What tests and benchmarks of checkpoints share: states of known content, runs to be killed, full file systems."""

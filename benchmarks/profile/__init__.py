"""What the profiler is measured on, and the measurements."""

"""Settings of the features of `memory`, free of torch."""

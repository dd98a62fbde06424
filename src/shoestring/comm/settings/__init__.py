"""Settings of the features of `comm`, free of torch."""

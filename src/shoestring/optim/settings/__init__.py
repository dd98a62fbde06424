"""The settings of the features of `optim`, free of torch."""

"""The arguments of `shoestring hub`, and how its results are printed; imports neither torch nor Django."""

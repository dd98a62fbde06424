"""State that lies in host memory: what the optimizer steps, and the way of gradients down and of weights up."""

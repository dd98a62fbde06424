"""ZeRO: optimizer state and gradients divided among ranks, in buckets of shards of every parameter."""

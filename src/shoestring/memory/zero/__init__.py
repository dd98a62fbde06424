"""ZeRO: optimizer state and gradients are divided among ranks, in shards of every parameter, exchanged in buckets."""

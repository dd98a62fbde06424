"""ZeRO: divides optimizer state and gradients among ranks as shards of parameters, and exchanges shards in buckets."""

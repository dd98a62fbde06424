"""ZeRO: divides optimizer state and gradients among ranks in shards of every parameter, and exchanges shards in
buckets."""

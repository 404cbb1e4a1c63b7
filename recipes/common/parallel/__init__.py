"""What several techniques share: DDP's buckets, weights that ranks hold in shards, groups of ranks."""

"""What several techniques share: DDP's buckets, weights that ranks hold in shards, gathering for a checkpoint."""

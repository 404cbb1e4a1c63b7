"""What several techniques share: DistributedDataParallel's buckets, weights that ranks hold in shards."""

"""Compare a training script with itself: the same training at every number of processes."""

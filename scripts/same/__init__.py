"""Hold a training script to itself: the same training at every number of processes."""

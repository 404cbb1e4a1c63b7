"""make plan: what a job will cost on a cluster of any size, before anybody pays for it."""

"""Clusters that tests, drills and measurements start on one machine: namespaced networks and Slurm."""

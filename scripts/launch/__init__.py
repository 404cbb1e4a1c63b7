"""What scripts/launch.sh calls: the launchers of one node's processes, and the network's environment."""

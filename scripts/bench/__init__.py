"""Speed, measured against the limit and against the peers: make bench."""

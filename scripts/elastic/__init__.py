"""Jobs that outlive their nodes: rounds of training, each with the nodes that are there."""

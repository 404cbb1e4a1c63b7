"""The preflight of a cluster: `make doctor NODES=2`, slurm/doctor.sbatch and k8s/doctor.yaml run it on each node.

__main__.py         the command line; what node 0 asks of all nodes, and in which order
rendezvous.py       node 0 listens at MASTER_ADDR:MASTER_PORT, the others connect and carry out its orders
node.py             what one node knows of itself: limits, /dev/shm, disk, driver, GPUs, interface, our revision
torch_facts.py      what torch knows of that node, in a process of its own: a broken torch is a finding
network.py          what one node sees of another: names, ports both ways, large packets
folder.py           whether all nodes see the same runs folder
collectives_job.py  starts the ranks of collectives.py on a node, with a time limit
collectives.py      one rank: the map of ranks, an all-reduce with a known sum, the bandwidth between nodes
rules.py            pure functions: facts of the nodes -> findings, each with its remedy
report.py           the lines and the JSON file
"""

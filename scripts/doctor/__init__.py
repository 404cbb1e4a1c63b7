"""The preflight of a cluster: `make doctor NODES=2`, slurm/doctor.sbatch and k8s/doctor.yaml run it on each node.

__main__.py asks all nodes for facts over the channels of rendezvous.py and stores them in a Case (case.py), which
rules.py and floors.py judge and report.py prints. The other files find out one kind of fact each.
"""

"""Kubernetes: manifests are validated, and executed as an operator would have them executed."""

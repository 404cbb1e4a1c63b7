"""Manifests, and the command that applies them and follows their jobs."""

"""Checkpoints that are whole or absent, in one file or in one for each rank."""

"""Faults planted in real jobs: jobs to watch, faults to plant, figures to take."""

"""What scripts/drill.py is made of: jobs to watch, faults to plant, figures to take."""

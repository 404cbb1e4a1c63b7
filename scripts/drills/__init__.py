"""What scripts/drill.py is made of: a network to break, jobs to watch, faults to plant, figures to take."""

"""Ways to start recipes under Slurm: sbatch files, and submitit."""

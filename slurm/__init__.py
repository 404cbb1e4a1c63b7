"""Ways to start recipes under Slurm: sbatch files, and submitit."""

import recipes  # noqa: F401 (Ctrl-C during the imports: no traceback)

"""The ranks of a job: where they are, what connects them, and what they do together."""

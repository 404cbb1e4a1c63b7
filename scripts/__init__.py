"""Launchers and tools; each module's docstring says what it starts."""

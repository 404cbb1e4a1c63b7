"""Launchers and tools; each module's docstring says what it starts."""

import recipes  # noqa: F401 (Ctrl-C during the imports: no traceback)

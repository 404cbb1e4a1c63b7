"""Manifests, and the command that applies them and follows their jobs."""

import recipes  # noqa: F401 (Ctrl-C during the imports: no traceback)

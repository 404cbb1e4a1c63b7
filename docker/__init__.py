"""Images, and the nodes of a job in containers of this machine."""

import recipes  # noqa: F401 (Ctrl-C during the imports: no traceback)

"""Self-contained recipes for training PyTorch models on more than one device."""

import sys
from types import TracebackType

_report = sys.excepthook


def _end_quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print no traceback for Ctrl-C; Python then ends by SIGINT, which a shell shows as status 130."""
    if not issubclass(kind, KeyboardInterrupt):
        _report(kind, error, trace)


sys.excepthook = _end_quietly  # also while a program imports torch, before its main()

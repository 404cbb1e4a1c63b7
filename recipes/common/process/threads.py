"""Actions in daemon threads: one that never returns does not keep the process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

THREAD = "begun action"
"""The name of their threads."""


def begin_in_threads(actions: Sequence[Callable[[], Any]], threads: int) -> list[Future[Any]]:
    """Begin actions in order, in daemon threads: at Ctrl-C, Python would wait for those of a pool."""
    begun = [(Future[Any](), action) for action in actions]
    waiting = iter(begun)  # each thread takes the next one

    def work() -> None:
        for future, action in waiting:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(action())
                except BaseException as error:
                    future.set_exception(error)

    for _ in range(min(threads, len(actions))):
        threading.Thread(target=work, name=THREAD, daemon=True).start()
    return [future for future, _ in begun]

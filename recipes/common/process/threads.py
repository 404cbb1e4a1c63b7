"""Actions in daemon threads: one that never returns does not keep the process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

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


def call_within(function: Callable[[], T], timeout_s: float) -> T:
    """Return the result of a function; after timeout_s, leave it in its thread and raise TimeoutError."""
    try:
        return begin_in_threads([function], 1)[0].result(timeout_s)
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"no answer within {timeout_s:.0f} s") from None

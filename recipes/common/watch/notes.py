"""Notes that ranks leave for one another, in a store that may not answer."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

T = TypeVar("T")

ANSWER_TIMEOUT_S = 1.0
"""How long to wait for the store to answer: the rank that hosts it may be the one that hangs."""

AT_ONCE = 256
"""Most notes that a request asks for: a TCPStore takes ten times as long to send 25 MB in one answer."""


class Store(Protocol):
    """A store that all ranks share, such as torch's TCPStore; the recipe passes it in."""

    def set(self, key: str, value: str, /) -> None: ...  # noqa: D102
    def get(self, key: str, /) -> bytes: ...  # noqa: D102
    def check(self, keys: list[str], /) -> bool: ...  # noqa: D102
    def add(self, key: str, amount: int, /) -> int: ...  # noqa: D102
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...  # noqa: D102


def run_bounded(action: Callable[[], T], otherwise: T, error: type[Exception], bound_s: float) -> tuple[T, bool]:
    """Return action(), or `otherwise` if it raises this error or is late, and whether it is late.

    A late action runs on, in its thread.
    """
    result = [otherwise]

    def act() -> None:
        with contextlib.suppress(error):
            result[0] = action()

    thread = threading.Thread(target=act, name="watch: bounded", daemon=True)
    thread.start()
    thread.join(bound_s)
    is_late = thread.is_alive()  # first: what arrives after this counts as late
    return result[0], is_late


class Notes:
    """The notes of all ranks in their store. Without a store (None), nothing is kept and reads return defaults."""

    def __init__(self, store: Store | None, world_size: int) -> None:
        self.store, self.world_size = store, world_size

    def ask(self, action: Callable[[Store], T], otherwise: T, bound_s: float = ANSWER_TIMEOUT_S) -> T:
        """Return action(store), or `otherwise` if there is no store, or it fails or does not answer in time."""
        store = self.store
        if store is None:
            return otherwise
        bound_s += self.world_size / 2000  # some actions read a key of each rank
        result, is_late = run_bounded(lambda: action(store), otherwise, RuntimeError, bound_s)
        if is_late:
            self.store = None  # asking again is pointless
        return result

    def put(self, key: str, text: str) -> None:
        """Store a text under a key."""
        self.ask(lambda store: store.set(key, text), None)

    def has(self, key: str) -> bool:
        """Return whether any rank has stored a text under the key."""
        return self.ask(lambda store: store.check([key]), False)

    def count(self, key: str, otherwise: int) -> int:
        """Return how many ranks have called this for the key, including this one."""
        return self.ask(lambda store: store.add(key, 1), otherwise)

    def read(self, kind: str, ranks: Iterable[int]) -> dict[int, str]:
        """Return the texts of a kind that these ranks have stored, by rank."""
        return self.ask(lambda store: read_notes(store, kind, ranks), dict[int, str]())


def find_missing(store: Store, keys: list[str]) -> list[str]:
    """Return the keys that a store lacks; if these are few, that takes few requests."""
    if store.check(keys):
        return []
    half = len(keys) // 2
    return [*find_missing(store, keys[:half]), *find_missing(store, keys[half:])] if half else keys


def read_notes(store: Store, kind: str, ranks: Iterable[int]) -> dict[int, str]:
    """Return the texts of a kind that these ranks have put into a store, by rank, without ranks that have none.

    One request asks for many texts, because a request per rank takes seconds for thousands of ranks.
    """
    asked, found = list(ranks), dict[int, str]()
    for i in range(0, len(asked), AT_ONCE):
        keys = {f"{kind}/{rank}": rank for rank in asked[i : i + AT_ONCE]}
        for key in find_missing(store, list(keys)):
            del keys[key]
        texts = store.multi_get(list(keys)) if keys else []
        found.update({rank: text.decode() for rank, text in zip(keys.values(), texts, strict=True)})
    return found

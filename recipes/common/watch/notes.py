"""What ranks put down for one another, in a store that may not answer."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

T = TypeVar("T")

ANSWER_S = 1.0
"""How long the store may take to answer: the rank that keeps it may be the one that hangs."""


class Store(Protocol):
    """A store that all ranks share, such as torch's TCPStore; the recipe hands it in."""

    def set(self, key: str, value: str, /) -> None: ...  # noqa: D102
    def get(self, key: str, /) -> bytes: ...  # noqa: D102
    def check(self, keys: list[str], /) -> bool: ...  # noqa: D102
    def add(self, key: str, amount: int, /) -> int: ...  # noqa: D102


class Notes:
    """The notes of all ranks. Without a store (None), nothing is kept, and nobody answers."""

    def __init__(self, store: Store | None, world_size: int) -> None:
        self.store, self.world_size = store, world_size

    def ask(self, action: Callable[[Store], T], otherwise: T, bound_s: float = ANSWER_S) -> T:
        """Return what an action on the store gives; otherwise, if there is none, or it does not answer in time."""
        store, result = self.store, [otherwise]
        if store is None:
            return otherwise

        def act() -> None:
            with contextlib.suppress(RuntimeError):
                result[0] = action(store)

        thread = threading.Thread(target=act, name="watch: store", daemon=True)
        thread.start()
        thread.join(bound_s + self.world_size / 2000)  # some questions are about all ranks
        if thread.is_alive():
            self.store = None  # no use to ask again
        return result[0]

    def put(self, key: str, text: str) -> None:
        """Put a text down."""
        self.ask(lambda store: store.set(key, text), None)

    def has(self, key: str) -> bool:
        """Whether some rank has put a text down."""
        return self.ask(lambda store: store.check([key]), False)

    def count(self, key: str, otherwise: int) -> int:
        """Return how many ranks have called this, with this one."""
        return self.ask(lambda store: store.add(key, 1), otherwise)

    def read(self, kind: str, ranks: Iterable[int]) -> dict[int, str]:
        """Return the texts of a kind that these ranks have put down, by rank."""
        nothing: dict[int, str] = {}
        return self.ask(lambda store: read(store, kind, ranks), nothing)


def read(store: Store, kind: str, ranks: Iterable[int]) -> dict[int, str]:
    """Return what a store has of a kind from these ranks, by rank."""
    keys = {rank: f"{kind}/{rank}" for rank in ranks}
    return {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}

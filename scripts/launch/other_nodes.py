"""End a node's ranks once another node of the job has failed, also if they do not notice it.

On CPUs, ranks that lose others fail at once. A rank that waits for a GPU runs no Python code, and its NCCL may not
notice for minutes that a rank elsewhere has ended. So each agent says in node 0's store that its ranks have
failed, and looks for what others have said.
"""

from __future__ import annotations

import signal
import sys
import threading
import time

from torch.distributed import Store

from recipes.common.errors import UserError
from recipes.common.process.entry import LOST_RANK_STATUS
from recipes.common.process.node import Failure, Node
from recipes.common.watch.notes import ANSWER_TIMEOUT_S, run_bounded

LOOK_EVERY_S = 2.0
"""Time between two looks."""

LOST_GRACE_S = 10.0
"""How long ranks may take to notice a failure elsewhere by themselves, and to end."""


class FailedNodeError(UserError):
    """Another node has failed, and the ranks of this one have not noticed it."""

    status = 1


class OtherNodes:
    """What a job's other nodes know of this one, and this one of them, in a store that node 0 serves."""

    failure = ""
    """The first node that has failed and how, as it has said; "" if none has, or it is this one."""

    def __init__(self, node: Node, store: Store) -> None:
        self._failed = f"node {node.node_rank} failed: "
        self._store = store
        self._since = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="other nodes", daemon=True)
        self._thread.start()

    def tell(self, cause: str) -> None:
        """Say that this node has failed, unless another one has said so of itself."""
        text = self._failed + cause
        first, _ = run_bounded(
            lambda: self._store.compare_set("failed", "", text), b"", RuntimeError, ANSWER_TIMEOUT_S
        )
        self._note(first.decode())

    def excuse(self, failures: dict[int, Failure]) -> dict[int, Failure]:
        """Return how ranks have failed; after a failure elsewhere, NCCL aborts those that have lost another."""
        aborted = {rank for rank, failure in failures.items() if failure.status == -signal.SIGABRT}
        if not (aborted and self.failure):
            return failures
        print(f"error: {self.failure}", file=sys.stderr, flush=True)
        return failures | {rank: failures[rank]._replace(status=LOST_RANK_STATUS) for rank in aborted}

    def check(self) -> None:
        """Raise FailedNodeError if another node failed LOST_GRACE_S ago."""
        if self.failure and time.monotonic() > self._since + LOST_GRACE_S:
            raise FailedNodeError(f"{self.failure}; the ranks of this node have not noticed, and are ended")

    def close(self) -> None:
        """Look no longer: node 0 may end."""
        self._closed.set()
        self._thread.join(LOOK_EVERY_S)

    def _note(self, failure: str) -> None:
        if failure and not self.failure and not failure.startswith(self._failed):
            self.failure, self._since = failure, time.monotonic()

    def _look(self) -> None:
        has_head_left = False
        try:
            while not self.failure and not self._closed.wait(LOOK_EVERY_S):
                if self._store.check(["failed"]):
                    self._note(self._store.get("failed").decode())
                has_head_left = has_head_left or self._store.check(["left/0"])
        except RuntimeError:
            if not (has_head_left or self._closed.is_set()):
                self._note("node 0 ended, see its log")

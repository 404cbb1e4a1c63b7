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
from recipes.common.process.entry import LOST_RANK_STATUS, USAGE_STATUS
from recipes.common.process.node import OWN_ERROR, Failure, Node
from recipes.common.process.ranks import connect_within
from recipes.common.watch.notes import ANSWER_TIMEOUT_S, run_bounded
from recipes.common.watch.timeouts import HANG_STATUS
from scripts.launch import script
from scripts.launch.rank_processes import cause_of_failure, own_failures

LOOK_EVERY_S = 2.0
"""Time between two looks."""

LOST_GRACE_S = 10.0
"""How long ranks may take to notice a failure elsewhere by themselves, and to end."""

REPORT_GRACE_S = 60.0
"""The same after a hang: ranks that notice it write and combine their reports."""

CAUSE, VICTIM = "failed", "lost"
"""Keys of what the first node has said whose own ranks failed, and the first that has only lost others."""


class FailedNodeError(UserError):
    """Another node has failed, and ranks of this one still run."""


class OtherNodes:
    """What a job's other nodes know of this one, and this one of them, in a store that node 0 serves."""

    cause = ""
    """How the first node to fail has failed, if it is another one."""

    def __init__(self, node: Node, store: Store) -> None:
        self._node, self._store = node, store
        self._failure, self._status, self._since = "", 1, 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="other nodes", daemon=True)
        self._thread.start()

    def tell_failures(self, failures: dict[int, Failure]) -> None:
        """Say how this node's ranks have failed, unless another node has said so of its own."""
        statuses = {failure.status for failure in own_failures(failures).values()}
        known = (USAGE_STATUS,) if script.is_set() else (USAGE_STATUS, HANG_STATUS)
        status = next((status for status in known if status in statuses), 1)
        is_victim = statuses <= {LOST_RANK_STATUS, -signal.SIGABRT}
        self.tell(status, cause_of_failure(failures).removesuffix(OWN_ERROR), VICTIM if is_victim else CAUSE)

    def tell(self, status: int, how: str, key: str = CAUSE) -> None:
        """Say with which status and how this node has failed, unless another node has said so of itself."""
        text = f"{status} node {self._node.node_rank} failed: {how}"
        if not self._failure or key == CAUSE:
            run_bounded(lambda: self._store.compare_set(key, "", text), b"", RuntimeError, ANSWER_TIMEOUT_S)

    def excuse(self, failures: dict[int, Failure]) -> dict[int, Failure]:
        """Return how ranks have failed; after a failure elsewhere, NCCL aborts those that have lost another."""
        run_bounded(self._read, None, RuntimeError, ANSWER_TIMEOUT_S)
        aborted = {rank for rank, failure in failures.items() if failure.status == -signal.SIGABRT}
        if not (aborted and self.cause):
            return failures
        print(f"error: {self.cause}", file=sys.stderr, flush=True)
        return failures | {rank: failures[rank]._replace(status=LOST_RANK_STATUS) for rank in aborted}

    def check(self) -> None:
        """Raise FailedNodeError if another node failed a while ago."""
        grace_s = REPORT_GRACE_S if self._status == HANG_STATUS else LOST_GRACE_S
        if self._failure and time.monotonic() > self._since + grace_s:
            error = FailedNodeError(f"{self._failure}; ranks of this node still ran, and are ended")
            error.status = self._status
            raise error

    def close(self) -> None:
        """Look no longer: node 0 may end."""
        self._closed.set()
        self._thread.join(LOOK_EVERY_S)

    def _note(self, text: str, is_cause: bool = False) -> None:
        status, failure = text.split(" ", 1)
        if not failure.startswith(f"node {self._node.node_rank} "):
            self._since = self._since or time.monotonic()  # first: check() may look at once
            self._status, self._failure = int(status), failure
            self.cause = failure if is_cause else ""

    def _read(self) -> None:
        if self._store.check([CAUSE]):
            self._note(self._store.get(CAUSE).decode(), is_cause=True)
        elif not self._failure and self._store.check([VICTIM]):
            self._note(self._store.get(VICTIM).decode())

    def _look(self) -> None:
        has_head_left = False
        try:
            while not self.cause and not self._closed.wait(LOOK_EVERY_S):
                self._read()
                has_head_left = has_head_left or self._store.check(["left/0"])
        except RuntimeError:
            if not (self._failure or has_head_left or self._closed.is_set() or self._head_answers()):
                self._note("1 node 0 ended, see its log")

    def _head_answers(self) -> bool:
        try:
            connect_within(self._node.master_addr, self._node.master_port, 0)
        except OSError:
            return False
        return True

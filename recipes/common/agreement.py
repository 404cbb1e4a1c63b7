"""What the ranks of a job do together: share out samples, run an action, raise an error, begin a run.

It needs few operations, those of `Peers`. torch.distributed gives them in world.py, Horovod in its own recipe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from recipes.common.errors import UserError
from recipes.common.job import Job
from recipes.common.nonfinite import raise_first
from recipes.common.places import place_of
from recipes.common.record import open_run
from recipes.common.watch import Watch

T = TypeVar("T")

Content = dict[str, Any]
"""What a checkpoint holds."""


class Peers(Protocol):
    """All ranks of a job, as one of them sees them. All ranks have to call each method, in the same order."""

    @property
    def rank(self) -> int:
        """This process's number."""

    @property
    def world_size(self) -> int:
        """The number of processes."""

    @property
    def device(self) -> torch.device:
        """This process's device."""

    @property
    def watch(self) -> Watch:
        """What each wait for the others is announced to."""

    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's value, in the order of the ranks."""

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's value."""

    def barrier(self) -> None:
        """Return once every rank has called it."""


def shard(indices: Tensor, index: int, count: int) -> Tensor:
    """Return share `index` of `count` shares of the indices: contiguous, and as even as it goes.

    The shares are disjoint and make up the whole, without padding or repetition.
    """
    first = len(indices) * index // count
    end = len(indices) * (index + 1) // count
    return indices[first:end]


def raise_on_all_ranks(error: UserError | None, peers: Peers) -> None:
    """Raise on every rank the error of the lowest-numbered rank that has one; call it on all ranks."""
    with peers.watch("agreement"):
        errors = peers.gather_objects(error)
    raise_first(errors)


def run_on_all_ranks(action: Callable[[], T], peers: Peers) -> T:
    """Return what action() returns on this rank, or raise on every rank what it raised on any.

    Call it on all ranks.
    """
    result, error = None, None
    try:
        result = action()
    except UserError as caught:
        error = caught
    raise_on_all_ranks(error, peers)
    return cast(T, result)


def begin_run(
    job: Job,
    recipe: str,
    peers: Peers,
    own_part: Callable[[Content | None], Content | None] = lambda content: content,
) -> None:
    """Open the run's record on rank 0 and restore its checkpoint on all ranks; call it on all ranks.

    `own_part` returns what this rank keeps of a checkpoint's content (default: all).

    Raises:
        UserError: the record cannot be opened, or the checkpoint does not fit.
    """
    with peers.watch("places"):
        places = peers.gather_objects(place_of(job.device))
    is_first = peers.rank == 0
    job.record, content = run_on_all_ranks(
        lambda: open_run(job.args, recipe, places) if is_first else (None, None), peers
    )
    with peers.watch("checkpoint"):
        content = peers.broadcast_object(content)
        folder = peers.broadcast_object(job.record.folder if job.record else None)
    run_on_all_ranks(lambda: job.restore(own_part(content)), peers)
    peers.watch.follow(job, folder)

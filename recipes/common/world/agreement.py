"""What the ranks of a job do together: share out samples, run an action, raise an error, load the same data."""

from __future__ import annotations

import platform
import socket
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib.metadata import distributions
from itertools import chain
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from recipes.common.arguments import is_user_code
from recipes.common.data import Data, find_for_all_ranks, load_data
from recipes.common.data.splits import digest
from recipes.common.errors import UserError
from recipes.common.nonfinite import NonFiniteError
from recipes.common.options import Options
from recipes.common.world.peers import Peers

T = TypeVar("T")


def shard(indices: Tensor, index: int, count: int) -> Tensor:
    """Return share `index` of `count` shares of the indices: contiguous, and as even as possible.

    The shares are disjoint and cover all indices, without padding or repetition.
    """
    first = len(indices) * index // count
    end = len(indices) * (index + 1) // count
    return indices[first:end]


def raise_on_all_ranks(error: UserError | None, peers: Peers) -> None:
    """Raise on every rank the error of the lowest-numbered rank that has one; call it on all ranks."""
    sent = error
    if error and not isinstance(error, NonFiniteError):
        sent = UserError(str(error))  # ranks take no other class from one another, such as WorkerError
        sent.status = error.status
    with peers.watch("agreement"):
        errors = peers.gather_objects(sent)
    raise_first(errors)


def raise_first(errors: Sequence[UserError | None]) -> None:
    """Raise the error of the lowest-numbered rank that reported one; `errors` holds each rank's error, or None."""
    if len(errors) == 1 and errors[0]:
        raise errors[0]
    for rank, error in enumerate(errors):
        if isinstance(error, NonFiniteError):
            ranks = [i for i, other in enumerate(errors) if isinstance(other, NonFiniteError) and other.is_loss]
            raise NonFiniteError(error.step, bool(ranks), error.hint, ranks)
        if error:
            # An error of a sharded checkpoint, which ranks wrote together, names its rank already.
            is_named = rank == 0 or str(error).startswith("rank ")
            raised = UserError(str(error) if is_named else f"rank {rank}: {error}")
            raised.status = error.status
            raise raised


def run_on_all_ranks(action: Callable[[], T], peers: Peers) -> T:
    """Run an action and return this rank's result; if it raises a UserError on any rank, raise that on every rank.

    Call it on all ranks.
    """
    result, error = None, None
    try:
        result = action()
    except UserError as caught:
        error = caught
    raise_on_all_ranks(error, peers)
    return cast(T, result)


SLOWEST = 10e6
"""Bytes per second that every disk for checkpoints reads and writes at least."""

SLOWEST_SHARED = 1e9
"""The same of what all ranks write together to a file system for sharded checkpoints."""


def wait_for_all(
    wait: Callable[[float | None], bool],
    peers: Peers,
    timeout_s: float,
    allowed_s: float,
    name: str = "checkpoint",
) -> None:
    """Wait until wait() returns true on all ranks; call it on all ranks.

    wait(bound_s) waits at most so long (None: without bound) for this rank's work, and returns whether it is done.
    For `allowed_s` seconds, a rank whose work is not done reports to the others before `timeout_s` expires; after
    that, they wait for it as for any other rank. `name` says in a report of a hang what the ranks wait for.
    """
    end = time.monotonic() + allowed_s
    is_done = False
    while not is_done:
        own = wait(timeout_s / 4 if time.monotonic() < end else None)
        with peers.watch(name):
            is_done = all(peers.gather_objects(own))


MAY_DIFFER = frozenset({"config", "data_dir", "cache_dir", "runs_dir", "workers", "node_rank"})
"""Options that may differ between ranks: local paths, and those that change no sample and no weight."""

LIBRARIES = ("torch", "torchvision", "numpy", "pillow", "nvidia-nvimgcodec-cu13", "horovod", "apex")
"""Packages whose versions have to be the same on all ranks."""


def load_same_data(args: Options, recipe: str, peers: Peers, on_bad_image: Callable[[UserError], None]) -> Data:
    """Load the data set, and check that all ranks train the same; call it on all ranks, before anything else.

    Options are compared first: they decide which collectives load the data, and which groups the ranks make.

    Raises UserError if data are missing or malformed, as check_compiler(), or, with the first difference, if a
    rank's options, data, code or libraries differ from rank 0's.
    """
    found = b""
    if peers.world_size > 1:
        check_same_facts(run_on_all_ranks(lambda: training_facts(args, recipe), peers), peers)
        own = run_on_all_ranks(lambda: find_for_all_ranks(args) if peers.rank == 0 else b"", peers)
        with peers.watch("data set"):
            content = torch.empty(peers.broadcast_object(len(own)), dtype=torch.uint8)
            content.numpy()[: len(own)] = np.frombuffer(own, np.uint8)
            if len(content):
                peers.broadcast_tensor(content)
        found = content.numpy().tobytes()
    if args.compile:
        from recipes.common.compiled_code import check_compiler

        run_on_all_ranks(lambda: check_compiler(peers.device), peers)
    data = run_on_all_ranks(lambda: load_data(args, peers.device, on_bad_image, found), peers)
    splits = {"the training set": data.train, "the test set": data.test}
    facts = run_on_all_ranks(lambda: {name: split.fingerprint() for name, split in splits.items()}, peers)
    fix = f"{SAME_START}; seed what --data draws, also at import" if is_user_code(args.data) else SAME_START
    check_same_facts(facts, peers, fix)
    names = {"classes": list(data.classes)} if data.classes else {}  # the digests are of the labels, too
    return replace(data, fingerprints={**facts, **names})


def training_facts(args: Options, recipe: str) -> dict[str, str]:
    """Return everything that decides what a run computes from its data, by name: options, code, versions."""
    values = vars(args).items()
    facts = {f"--{name.replace('_', '-')}": str(value) for name, value in values if name not in MAY_DIFFER}
    root = Path(__file__).parents[2]
    folders = {"common", recipe, *(["ddp"] if recipe == "spawn" else [])}  # spawn's ranks are ddp's
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        facts[f"recipes/{path.relative_to(root)}"] = f"code with digest {zlib.crc32(path.read_bytes()):08x}"
    if args.has_user_code:
        from recipes.common.user_code import digests

        facts.update(digests(args))
    facts["python"] = platform.python_version()
    for name in LIBRARIES:
        facts[name] = next((found.version for found in distributions(name=name)), "not installed")
    return facts


def take_rank_0s_values(args: Options, model: nn.Module, peers: Peers) -> None:
    """Overwrite the parameters and buffers of the user's model with rank 0's; call it on all ranks.

    Code may draw them by a generator of its own, or read them only on rank 0, and some kinds of processors round
    differently. Raises UserError on all ranks if models differ in names, shapes or dtypes.
    """
    if is_user_code(args.model) and peers.world_size > 1:
        tensors = dict(chain(model.named_parameters(), model.named_buffers()))
        forms = "".join(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n" for name, tensor in tensors.items())
        what = f"a model of {len(tensors)} tensors, whose names and shapes have the digest"
        own = {f"--model {args.model}": f"{what} {zlib.crc32(forms.encode()):08x}"}
        check_same_facts(own, peers, "let all ranks build the same layers")
        with peers.watch("model"):
            for tensor in tensors.values():
                peers.broadcast_tensor(tensor)


def check_same_weights(
    args: Options, parameters: Iterable[Tensor], buffers: Iterable[Tensor], peers: Peers
) -> None:
    """Check that the user's model begins with the same values on all ranks; call it on all ranks.

    It is for recipes whose ranks keep only parts of the model. Raises UserError on all ranks.
    """
    if is_user_code(args.model) and peers.world_size > 1:
        own = f"parameters of digest {digest(*parameters):08x} and buffers of digest {digest(*buffers):08x}"
        fix = "let all ranks draw or read the same values"
        check_same_facts({f"--model {args.model}": f"a model with {own}"}, peers, fix)


SAME_START = "start all ranks with the same options, data, code and libraries"


def check_same_facts(facts: dict[str, str], peers: Peers, fix: str = SAME_START) -> None:
    """Compare the facts of all ranks with rank 0's; call it on all ranks."""
    with peers.watch("agreement"):
        expected = peers.broadcast_object(facts)  # up to some 5 kB
    run_on_all_ranks(lambda: check_facts(facts, expected, fix), peers)


def check_facts(own: dict[str, str], expected: dict[str, str], fix: str = SAME_START) -> None:
    """Raise UserError with the first of this rank's facts that differs from rank 0's."""
    for name in [*expected, *own]:
        here, there = own.get(name, "missing"), expected.get(name, "missing")
        may_lack = name.startswith("import ")  # of the user's code: only rank 0 may import a logger
        if here != there and not (may_lack and "missing" in (here, there)):
            raise UserError(f"{name} is {here} on {socket.gethostname()}, and {there} on rank 0; {fix}")

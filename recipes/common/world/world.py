"""The processes of a job, connected by torch.distributed, which only this file and parallel/ import."""

from __future__ import annotations

import contextlib
import gc
import inspect
import io
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.common.errors import UserError
from recipes.common.nonfinite import NonFiniteError
from recipes.common.options import Options
from recipes.common.process.open_files import STORE_CONNECTIONS, allow_open_files
from recipes.common.process.ranks import Ranks, bind_address, connect_within, read_ranks
from recipes.common.process.signals import Stop
from recipes.common.watch.notes import find_missing
from recipes.common.watch.timeouts import HANG_STATUS, group_timeout, time_limit, wait_timeout
from recipes.common.watch.watch import Watch
from recipes.common.world.devices import KINDS, agree_on_device, choose_device
from recipes.common.world.peers import Peers, broadcast_bytes
from recipes.common.world.places import Place

T = TypeVar("T")
OwnOptions = TypeVar("OwnOptions", bound=Options)

KEYWORDS = inspect.signature(dist.gather_object).parameters
NO_PICKLE: dict[str, Any] = {"weights_only": True} if "weights_only" in KEYWORDS else {}
"""Makes torch read other ranks' values like checkpoints, without running code; older torch unpickles them."""

MANY = 256
"""In jobs of more ranks than this, gloo connects two ranks only once they exchange something."""

SLACK_S = 5.0
"""How long a library may take to report its own time-out."""

NO_CONNECTION = ("connectFullMesh", "timed out connecting", "Connect timeout")
"""Phrases in gloo's errors about a rank that it cannot reach; the last two with more than MANY ranks."""

SAFE_CLASSES: list[Any] = [UserError, NonFiniteError, Place, type(Path())]
"""Classes that ranks send each other besides tensors, numbers, strings, and lists, tuples and dicts of them."""


class ValueUnpickler(pickle.Unpickler):
    """Read plain values and objects of SAFE_CLASSES; a None takes 4 bytes, where torch's own loader needs 1 kB."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of SAFE_CLASSES; raises UnpicklingError for any other name, which could be code."""
        found = [kind for kind in SAFE_CLASSES if (kind.__module__, kind.__qualname__) == (module, name)]
        if not found:
            raise pickle.UnpicklingError(f"another rank sent {module}.{name}, which is none of SAFE_CLASSES")
        return found[0]


@dataclass(frozen=True)
class World(Peers):
    """This process among the others."""

    rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup
    """A gloo group besides the group of the gradients, for the few bytes that ranks exchange on the CPU."""
    watch: Watch

    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's value, in the order of the ranks; call it on all ranks."""
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        # World: gathers the size of each rank's value, 8 bytes, and the values, padded to the longest.
        dist.all_gather(list(sizes.split(1)), torch.tensor([len(own)]), group=self.control)
        rows = torch.zeros(self.world_size, int(sizes.max()), dtype=torch.uint8)
        dist.all_gather(
            list(rows.unbind()), nn.functional.pad(own, (0, rows.shape[1] - len(own))), group=self.control
        )
        texts = (row[:size].numpy().tobytes() for row, size in zip(rows, sizes.tolist(), strict=True))
        return [ValueUnpickler(io.BytesIO(text)).load() for text in texts]

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's value; call it on all ranks."""
        box = [value]
        with torch.serialization.safe_globals(SAFE_CLASSES):
            # World: rank 0 sends its value to all others.
            dist.broadcast_object_list(box, src=0, group=self.control, **NO_PICKLE)
        return box[0]

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Overwrite a tensor, on the CPU or this rank's device, with rank 0's; call it on all ranks."""
        # World: rank 0 sends the tensor's bytes to all others. Gloo knows neither int16 nor float8.
        broadcast_bytes(tensor, lambda own: dist.broadcast(own, src=0, group=self._group_of(tensor)))

    def sum_tensor(self, tensor: Tensor) -> None:
        """Overwrite a tensor, on the CPU or this rank's device, with the ranks' sum; call it on all ranks."""
        # World: a ring all-reduce; each rank sends 2 (N-1)/N of the tensor's bytes.
        dist.all_reduce(tensor, group=self._group_of(tensor))

    def begin_vote(self, vote: int) -> Callable[[], int]:
        """Send this rank's vote; return a function that waits for the others' and returns the largest."""
        largest = torch.tensor(vote, dtype=torch.int32)
        # World: each rank sends its vote, 4 bytes, while it computes.
        voting = dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.control, async_op=True)

        def finish_vote() -> int:
            voting.wait()
            return int(largest)

        return finish_vote

    def with_own_group(self, args: Options, allowed_s: float) -> World:
        """Return a World of the same ranks with its own connections, for another thread; call it on all ranks.

        A rank may wait there for `allowed_s` seconds longer than for --timeout-s.
        """
        timeout = wait_timeout(args) + timedelta(seconds=allowed_s)
        with self.watch("groups"):
            group = dist.new_group(backend="gloo", timeout=timeout)
        return replace(self, control=cast(dist.ProcessGroup, group))

    def _group_of(self, tensor: Tensor) -> dist.ProcessGroup | None:
        """Return the group for a tensor: the default one (NCCL) for a GPU's, `control` for the CPU's."""
        return None if tensor.is_cuda else self.control


def train_as_rank(
    recipe: str,
    args: OwnOptions,
    train: Callable[[OwnOptions, World, Stop], None],
    devices_per_rank: int = 1,
) -> None:
    """Train as the rank that a launcher has given to this process; call it on every rank."""
    stop, ranks = Stop(), read_ranks(recipe)
    args.check_world_size(ranks.world_size)
    with connected_world(args, ranks, devices_per_rank) as world:
        train(args, world, stop)


@contextlib.contextmanager
def connected_world(args: Options, ranks: Ranks, devices_per_rank: int = 1) -> Iterator[World]:
    """Connect this process with the others; disconnect at the end, also if all ranks raise a UserError."""
    world = join_world(args, ranks, devices_per_rank)
    try:
        yield world
    except UserError as error:
        if not error.on_one_rank:
            leave_world(world)
        raise
    leave_world(world)


def join_world(args: Options, ranks: Ranks, devices_per_rank: int = 1) -> World:
    """Choose this process's device, connect it with the other processes, and watch what it waits for."""
    timeout = wait_timeout(args)
    device, control = connect(args.device, ranks, timeout, devices_per_rank)
    # Each rank notes what it waits for in the store at MASTER_ADDR:MASTER_PORT, where the others can read it.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timeout)
    watch = Watch(ranks.rank, ranks.world_size, args, dist.PrefixStore(f"watch/{restart_count(ranks)}", store))
    return World(ranks.rank, ranks.world_size, device, control, watch)


def connect(
    wanted: str, ranks: Ranks, timeout: timedelta, devices_per_rank: int = 1
) -> tuple[torch.device, dist.ProcessGroup]:
    """Connect all processes at MASTER_ADDR:MASTER_PORT; return this one's device and a gloo group of all of them.

    In the default group, CPU tensors go through gloo and CUDA tensors through NCCL. `wanted` is --device.

    Raises:
        MissingNodeError: the processes do not find each other in time, or cannot connect.
        UserError: the port is taken, rank 0 may not serve all, or not all can use the same kind of device.
    """
    allow_sockets(ranks)
    try:
        # World: rank 0 (or torchrun's agent) hosts a store there, through which processes then find each other.
        server = serve_on_loopback(ranks.rank)
        # Of one rank: torch would let rank 0 wait for all without learning which of them have come.
        rendezvous = dist.rendezvous("env://", rank=ranks.rank, world_size=1, timeout=timeout)
        with limit_connecting(ranks.rank, timeout, "rendezvous_error"):
            if ranks.rank:
                wait_for_store(ranks.rank, timeout)
            store, _, _ = next(iter(rendezvous))
        store = dist.PrefixStore(restart_count(ranks), store)
        del server  # the store has taken it over
        device = agree_on_device(
            lambda: choose_device(wanted, ranks, devices_per_rank),
            ranks.rank,
            lambda kind, text: _exchange_kinds(dist.PrefixStore("device", store), ranks, kind, text),
        )
        with limit_connecting(ranks.rank, timeout, "connection_error"):
            return device, make_groups(dist.PrefixStore("groups", store), ranks, device.type, timeout)
    except dist.DistError as error:
        from recipes.common.process.rendezvous_errors import rendezvous_error

        raise rendezvous_error(ranks.rank, str(error)) from None
    except RuntimeError as error:
        is_lost = "by peer" in str(error)  # another rank has ended
        if is_lost or not any(phrase in str(error) for phrase in NO_CONNECTION):
            raise
        from recipes.common.process.rendezvous_errors import connection_error

        raise connection_error(ranks.rank, str(error)) from None


def make_groups(store: dist.Store, ranks: Ranks, device_type: str, timeout: timedelta) -> dist.ProcessGroup:
    """Create the default group and a gloo group of all ranks; return the latter. Call it on all ranks."""
    backend = "gloo"
    if device_type == "cuda":
        from recipes.common.world.transport import log_nccl

        backend = "cpu:gloo,cuda:nccl"
        log_nccl()
    is_lazy = ranks.world_size > MANY
    if is_lazy:
        # World: otherwise each rank reads N times 8 N bytes from the store for each group, which is 4 TB for 8,192
        # ranks, and opens N sockets.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    limit = group_timeout(timeout, device_type)
    dist.init_process_group(backend, timeout=limit, store=store, rank=ranks.rank, world_size=ranks.world_size)
    control = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))
    if is_lazy:
        # World: 4 bytes, which connect each rank with its neighbours: if that fails, it does so here.
        dist.all_reduce(torch.zeros(1), group=control)
    return control


def allow_sockets(ranks: Ranks) -> None:
    """Let this process open gloo's connections, and on the rank that hosts the store also those to the store.

    Raises UserError on that rank if it may not.
    """
    # World: up to MANY ranks, each connects with all others in each group: the default, `control`, and two more.
    connections, store = 4 * min(ranks.world_size, MANY), ""
    if ranks.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        connections += STORE_CONNECTIONS * ranks.world_size
        store = f"the store for {ranks.world_size} ranks"
    allow_open_files(connections, store)


def wait_for_store(rank: int, timeout: timedelta) -> None:
    """Wait until the store answers; raises MissingNodeError. Torch would print a page of its C++ stack as well."""
    try:
        connect_within(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout.total_seconds())
    except (OSError, UnicodeError) as error:  # UnicodeError: the address cannot be a host's name
        from recipes.common.process.rendezvous_errors import rendezvous_error

        raise rendezvous_error(rank, getattr(error, "strerror", None) or str(error)) from None


def serve_on_loopback(rank: int) -> dist.Store | None:
    """If this rank hosts the store at 127.0.0.1, listen only there: torch itself would listen on all addresses."""
    place = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT") or 0)
    if rank or not bind_address(place[0]) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    try:
        listener = socket.create_server(place)
    except OSError:  # torch says why
        return None
    own: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": True}
    return dist.TCPStore(*place, is_master=True, master_listen_fd=listener.detach(), **own)


def restart_count(ranks: Ranks) -> str:
    """Return how often torchrun has restarted these ranks: `torchrun --max-restarts` keeps its store on one node.

    The agents of several nodes may count differently, and with --rdzv-backend=c10d make a new store.
    """
    is_one_node = ranks.local_world_size == ranks.world_size
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_node else "0"


def limit_connecting(rank: int, timeout: timedelta, error_name: str) -> contextlib.AbstractContextManager[None]:
    """End this process if it connects longer than two time-outs and SLACK_S: for a rank to come and to answer.

    Gloo itself waits for five if a rank ends after it has stored its address, and torch without a limit if another
    program listens at MASTER_PORT. Each node's first rank prints this error of rendezvous_errors.py.
    """
    limit_s = 2 * timeout.total_seconds() + SLACK_S

    def give_up() -> None:
        from recipes.common.process import rendezvous_errors

        if os.environ.get("LOCAL_RANK", "0") == "0":
            reason = f"no answer within {limit_s:g} s; if another rank has ended, see its error"
            print(f"error: {getattr(rendezvous_errors, error_name)(rank, reason)}", file=sys.stderr, flush=True)
        else:
            time.sleep(1.0)  # a launcher ends all ranks as soon as one exits
        os._exit(rendezvous_errors.MissingNodeError.status)

    return time_limit(limit_s, give_up)


def _exchange_kinds(store: dist.Store, ranks: Ranks, kind: str, text: str) -> dict[str, str]:
    """Serve as the `Exchange` of devices.py before there is a process group, by a few requests per rank."""
    # World: each rank sends its kind of device and its host to the store, and reads one rank's for each kind.
    is_taken = store.add(f"rank/{ranks.rank}", 1) > 1
    if is_taken and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # an agent may start ranks again
        if store.check(["all written"]):  # the others have met, and do not look here any more
            from recipes.common.process.rendezvous_errors import taken_rank_error

            raise taken_rank_error(ranks.rank)
        what = f"two processes are rank {ranks.rank}, one of them on {socket.gethostname()}"
        kind, text = "error", f"{what}; number nodes and ranks from 0"
    store.set(f"kind/{kind}", text)
    if store.add("written", 1) == ranks.world_size:
        store.set("all written", "")
    try:
        store.wait(["all written"])
    except dist.DistStoreError:  # the time is up
        from recipes.common.process.rendezvous_errors import missing_ranks_error

        missing = find_missing(store, [f"rank/{rank}" for rank in range(ranks.world_size)])
        if not missing:  # the last one came as the time ran out, and others may have left
            raise
        numbers = [int(key.removeprefix("rank/")) for key in missing]
        raise missing_ranks_error(ranks, numbers, cast(Any, store).timeout.total_seconds()) from None
    kinds = [name for name in KINDS if store.check([f"kind/{name}"])]
    found = {name: store.get(f"kind/{name}").decode() for name in kinds}
    if store.add("read", 1) == ranks.world_size:
        store.set("all read", "")
    if ranks.rank == 0:
        store.wait(["all read"])  # the store may end with rank 0
    return found


def leave_world(world: World) -> None:
    """Disconnect once no rank waits for another any more; call it on all ranks."""
    gc.collect()  # frees models and optimizers before the connections that they use
    with world.watch("teardown"):
        dist.barrier(group=world.control)
    world.watch.leave()
    with limit_leaving(world):
        dist.destroy_process_group()


def limit_leaving(world: World) -> contextlib.AbstractContextManager[None]:
    """End this process if it disconnects longer than the time-out and SLACK_S: NCCL's own wait has no limit."""
    limit_s = world.watch.args.timeout_s + SLACK_S

    def give_up() -> None:
        who = f"rank {world.rank} on {socket.gethostname()}"
        what = f"did not disconnect from the other ranks within {limit_s:g} s; its training had ended before"
        print(f"error: {who} {what}", file=sys.stderr, flush=True)
        os._exit(HANG_STATUS)

    return time_limit(limit_s, give_up)

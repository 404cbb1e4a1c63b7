"""What a step, a failure and a job cost at any size: arithmetic alone, without torch, clock or network.

The network follows Hockney's model: a message of n bytes takes alpha + n / bandwidth. All-reduces are those of
Thakur, Rabenseifner and Gropp 2005, https://doi.org/10.1177/1094342005051521 (ring), and Sanders, Speck and Traeff
2009, https://doi.org/10.1016/j.parco.2009.09.001 (two binary trees); hops within and between nodes are counted as
in NCCL's src/graph/tuning.cc. Checkpoints: Young 1974, https://doi.org/10.1145/361147.361115, and Daly 2006,
https://doi.org/10.1016/j.future.2004.11.016. docs/plan.md says what this leaves out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from recipes.common.process.signals import vote_interval

FUSION_BYTES = 128 * 2**20
"""Horovod's fusion buffer (HOROVOD_FUSION_THRESHOLD): gradients that are ready are sent together, up to this."""

CYCLE_S = 0.001
"""Horovod's HOROVOD_CYCLE_TIME: the interval at which it looks for gradients."""

BLOCK_BYTES = 25 * 2**20
"""Size of the blocks that fsdp gathers, assumed to equal DDP's buckets."""

FORWARD_SHARE = 1 / 3
"""Forward's share of a pass: backward computes gradients of inputs and of weights, twice forward's arithmetic."""

# ---- the network


@dataclass(frozen=True)
class Link:
    """Hockney's two numbers, in each direction: the latency of a message, and the rate of its bytes."""

    alpha_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Cluster:
    """A cluster of identical nodes with identical GPUs."""

    nodes: int
    gpus: int  # per node, one rank each
    network: Link  # between nodes: all ports of a node together
    intra: Link | None = None  # from one GPU of a node to the next; None: as between nodes
    loaded: Link | None = None  # between nodes while ranks compute, if the same cores also move the bytes
    groups: int = 1  # groups of such ranks on the same nodes, which share the network

    @property
    def ranks(self) -> int:
        """The world size."""
        return self.nodes * self.gpus

    def split(self, size: int) -> tuple[Cluster, Cluster]:
        """Return a group of `size` neighbouring ranks, and the group of those with the same place in each one."""
        gpus = min(self.gpus, size)
        nodes = size // gpus
        shared = replace(self.network, bytes_per_s=self.network.bytes_per_s / gpus)
        across = replace(self, nodes=self.nodes // nodes, gpus=self.gpus // gpus, groups=gpus)
        return replace(self, nodes=nodes, gpus=gpus), replace(across, network=shared)


def ring_bytes(nbytes: float, ranks: int) -> float:
    """Return the bytes that a rank sends in a ring all-reduce: 2 (p-1)/p of nbytes."""
    return 2 * (ranks - 1) / ranks * nbytes


class Exchange(NamedTuple):
    """An exchange without overlap: its time, and the bytes that a node sends to others (the average of a tree)."""

    seconds: float
    sent_bytes: float


def add_up(exchanges: Sequence[Exchange]) -> Exchange:
    """Return the sum of exchanges that follow one another."""
    return Exchange(sum(one.seconds for one in exchanges), sum(one.sent_bytes for one in exchanges))


def all_reduce(nbytes: float, cluster: Cluster, algorithm: str = "auto", part: float = 1.0) -> Exchange:
    """Return a part of an all-reduce by ring, tree or auto; an all-gather or a reduce-scatter is half of one.

    ring: one ring through all GPUs, which enters and leaves each node once.
    tree: two binary trees of nodes, each for half of the bytes, with a chain of GPUs in each node.
    auto: the faster of the two, which NCCL chooses.
    """
    if algorithm == "auto":
        return min(all_reduce(nbytes, cluster, name, part) for name in ("ring", "tree"))
    sent = cluster.groups * ring_bytes(nbytes, cluster.ranks if algorithm == "ring" else cluster.nodes)
    sent *= cluster.nodes > 1  # for the tree, the average over nodes
    if not cluster.intra:  # each GPU counts as a node
        rate = cluster.network.bytes_per_s / cluster.gpus
        cluster = replace(cluster, nodes=cluster.ranks, gpus=1, network=Link(cluster.network.alpha_s, rate))
    nodes, gpus, network, intra = cluster.nodes, cluster.gpus, cluster.network, cluster.intra or cluster.network
    between, within, over_link = 2 * (nodes - 1), 2 * nodes * (gpus - 1), ring_bytes(nbytes, nodes * gpus)
    if algorithm == "tree":
        between, within, over_link = 2 * math.ceil(math.log2(nodes)), 2 * (gpus - 1), 2 * nbytes
    rates = [network.bytes_per_s] * (nodes > 1) + [intra.bytes_per_s] * (gpus > 1)
    seconds = between * network.alpha_s + within * intra.alpha_s + (over_link / min(rates) if rates else 0.0)
    return Exchange(part * seconds, part * sent)


# ---- a step


@dataclass(frozen=True)
class Gradient:
    """One parameter's gradient."""

    shape: tuple[int, ...]
    ready: float  # the share of backward after which it is ready
    itemsize: int = 4

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes before any compression."""
        return self.numel * self.itemsize


class Message(NamedTuple):
    """Gradients that are sent together."""

    ready: float  # the share of backward after which the last of them is ready
    nbytes: float  # after compression


def ddp_messages(
    gradients: Sequence[Gradient], cap_bytes: float, first_bytes: float | None = None, factor: float = 1.0
) -> list[Message]:
    """Return DDP's buckets, which are filled in the order in which gradients are ready and closed once full.

    The first bucket may have its own size. `factor` is 0.5 for half precision.
    """
    buckets: list[list[Gradient]] = [[]]
    for gradient in gradients:
        limit = first_bytes if len(buckets) == 1 and first_bytes is not None else cap_bytes
        if buckets[-1] and sum(one.nbytes for one in buckets[-1]) >= limit:
            buckets.append([])
        buckets[-1].append(gradient)
    return [Message(bucket[-1].ready, factor * sum(one.nbytes for one in bucket)) for bucket in buckets]


@dataclass(frozen=True)
class Compute:
    """The computing time of a rank in a step, in seconds, without any exchange."""

    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0
    load: float = 0.0  # the share of the device that an exchange takes meanwhile: cores that both need
    fixed_share: float = 0.0  # of forward and backward: not shortened by fewer samples, such as kernel latencies

    @property
    def total_s(self) -> float:
        """The sum of all parts."""
        return self.forward_s + self.backward_s + self.optimizer_s

    def scaled(self, factor: float, passes: int = 1) -> Compute:
        """Return the time of `factor` times as many samples, in so many passes, each with the fixed part."""
        fixed = passes * self.fixed_share
        share = fixed + factor * (1 - self.fixed_share)
        forward_s, backward_s = self.forward_s * share, self.backward_s * share
        return replace(self, forward_s=forward_s, backward_s=backward_s, fixed_share=fixed / share)


def split_compute(seconds: float, fixed_s: float = 0.0) -> Compute:
    """Split a known total time into forward and backward; fixed_s of it is the same for any number of samples."""
    return Compute(seconds * FORWARD_SHARE, seconds * (1 - FORWARD_SHARE), fixed_share=fixed_s / seconds)


def exchanges_end_s(
    messages: Sequence[Message],
    cost: Callable[[float], float],
    compute: Compute,
    loaded_cost: Callable[[float], float] | None = None,
    fuse_bytes: float = 0.0,
) -> float:
    """Return when backward and all exchanges of a step are done; exchanges follow one another.

    Messages are in the order in which they can begin. cost(nbytes) is the time of an exchange, loaded_cost(nbytes)
    its time during backward, if that differs. Messages that have become ready meanwhile are sent together, up to
    fuse_bytes; 0: each message is sent alone.
    """
    now, work, backward_s = compute.forward_s, 0.0, compute.backward_s  # work: seconds of backward done
    waiting = [(message.ready * backward_s, message.nbytes) for message in messages]
    while waiting:
        ready_s, nbytes = waiting.pop(0)
        now, work = now + max(0.0, ready_s - work), max(ready_s, work)
        while waiting and waiting[0][0] <= work + 1e-12 and nbytes + waiting[0][1] <= fuse_bytes:
            nbytes += waiting.pop(0)[1]
        # First the part of the exchange that runs beside backward, then the rest.
        loaded_s = (loaded_cost or cost)(nbytes)
        beside_s = min(loaded_s, (backward_s - work) / (1 - compute.load))
        now, work = now + beside_s, work + beside_s * (1 - compute.load)
        now += (1 - beside_s / loaded_s) * cost(nbytes) if loaded_s else 0.0
    return now + backward_s - work


@dataclass(frozen=True)
class Method:
    """How a recipe distributes the model and exchanges gradients; the fields after `sums` are its options."""

    recipe: str
    sums: tuple[float, ...] = ()  # bytes of the all-reduces that tensor's layers wait for, forward's half first
    device: str = "auto"
    amp: str = "none"
    accumulate_steps: int = 1
    grad_compression: str = "none"
    bucket_cap_mb: float | None = None
    zero: bool = False
    replicas: int = 1
    reshard_after_forward: bool = True
    tensor_parallel: int = 1

    @property
    def algorithm(self) -> str:
        """The algorithm of all-reduces: gloo's ring, or the one that NCCL chooses."""
        return "ring" if self.device == "cpu" else "auto"

    @property
    def bucket_bytes(self) -> tuple[float, float | None]:
        """Bytes that fill a bucket, and the first one if that differs, as in the recipes' wrap()."""
        cap_mb = self.bucket_cap_mb or (4 if self.device == "cpu" and self.recipe in ("ddp", "spawn") else None)
        return (cap_mb or 25) * 2**20, None if cap_mb or self.recipe == "tensor" else 2**20

    def shards(self, ranks: int) -> int:
        """Return over how many ranks fsdp shards each parameter; 1 for the other recipes."""
        return ranks // self.replicas if self.recipe == "fsdp" else 1


@dataclass(frozen=True)
class Step:
    """The times and bytes of a rank's step."""

    step_s: float
    compute_s: float
    exchange_s: float  # all exchanges, without any overlap
    exposed_s: float  # what the exchanges add to the computing time
    sent_bytes_per_node: float  # to other nodes
    limit: str  # compute, exchange, vote or input: what to improve first


def step(
    gradients: Sequence[Gradient],
    compute: Compute,
    cluster: Cluster,
    method: Method,
    control_alpha_s: float = 0.0,
    input_s: float = 0.0,
) -> Step:
    """Return a step's times and bytes; gradients are in the order in which backward yields them.

    During forward and backward, the vote on stopping goes around a ring of all ranks, each hop in control_alpha_s.
    During the whole step, samples are read and decoded in input_s.
    """
    end_s, exchanges = _exchange(gradients, compute, cluster, method)
    if method.zero:  # each rank broadcasts its share of the new weights
        exchanges.append(all_reduce(sum(one.nbytes for one in gradients), cluster, "ring", part=0.5))
        end_s += exchanges[-1].seconds
    exchange_s, sent = add_up(exchanges)
    exposed_s = end_s - compute.forward_s - compute.backward_s
    vote_s = 2 * (cluster.ranks - 1) * control_alpha_s
    vote_wait_s = max(0.0, vote_s - end_s) / vote_interval(cluster.ranks, end_s)
    done_s = end_s + vote_wait_s + compute.optimizer_s
    total_s = max(done_s, input_s)
    waits_s = {"compute": 0.05 * total_s, "exchange": exposed_s, "vote": vote_wait_s}  # up to 5%: no limit
    limit = "input" if input_s > done_s else max(waits_s, key=lambda name: waits_s[name])
    return Step(total_s, compute.total_s, exchange_s, exposed_s, sent, limit)


def _exchange(
    gradients: Sequence[Gradient], compute: Compute, cluster: Cluster, method: Method
) -> tuple[float, list[Exchange]]:
    """Return when a recipe's exchanges are done, and each exchange without overlap."""
    computed_s = compute.forward_s + compute.backward_s
    if cluster.ranks == 1:
        return computed_s, []
    if method.recipe == "fsdp":
        return _by_shards(gradients, compute, cluster, method)
    # Layers of tensor wait for sums within a replica. Its replicas exchange gradients as other recipes' ranks do.
    within, across = cluster.split(method.tensor_parallel)
    sums = [all_reduce(nbytes, within, method.algorithm) for nbytes in method.sums]
    forward_s, backward_s = (add_up(half).seconds for half in (sums[: len(sums) // 2], sums[len(sums) // 2 :]))
    # With accumulated passes, gradients are exchanged during the last one's backward.
    last_s = (compute.backward_s + backward_s) / method.accumulate_steps
    before_s = computed_s + forward_s + backward_s - last_s
    busy = replace(compute, forward_s=before_s, backward_s=last_s)
    factor = 0.5 if method.grad_compression in ("fp16", "bf16") else 1.0
    lag_s = fuse_bytes = 0.0
    sent = messages = ddp_messages(gradients, *method.bucket_bytes, factor)
    if method.recipe == "horovod":  # sends what has become ready since its last cycle
        lag_s, fuse_bytes = CYCLE_S, FUSION_BYTES
        sent, messages = (ddp_messages(gradients, cap, factor=factor) for cap in (FUSION_BYTES, 0))
    exchanges = [all_reduce(message.nbytes, across, method.algorithm) for message in sent]

    def cost(nbytes: float, link: Link = across.network) -> float:
        return lag_s + all_reduce(nbytes, replace(across, network=link), method.algorithm).seconds

    loaded_cost = functools.partial(cost, link=across.loaded) if across.loaded else None
    return exchanges_end_s(messages, cost, busy, loaded_cost, fuse_bytes), sums + exchanges


def _by_shards(
    gradients: Sequence[Gradient], compute: Compute, cluster: Cluster, method: Method
) -> tuple[float, list[Exchange]]:
    """Return the same for fsdp: it gathers weights by block in each pass, and scatters gradients in the last.

    Weights of the next block arrive while a block computes. The first block's weights and the last gradients have
    nothing to overlap with.
    """
    within, across = cluster.split(method.shards(cluster.ranks))
    sizes, passes = [one.nbytes for one in ddp_messages(gradients, BLOCK_BYTES)], method.accumulate_steps
    # Parts of an all-reduce of the fp32 weights: --amp halves a gather; gloo's reduce-scatter is a whole one.
    parts = 0.5 if method.amp == "none" else 0.25, 1.0 if method.device == "cpu" else 0.5
    gathers, scatters = ([all_reduce(size, within, "ring", part) for size in sizes] for part in parts)
    # The copies of a shard average its gradients, all shards of a node at the same time.
    copies = all_reduce(sum(sizes) / within.ranks, across, method.algorithm)
    again = gathers if method.reshard_after_forward else []
    forward_s = max(compute.forward_s, passes * add_up(gathers).seconds)
    pass_s, again_s = compute.backward_s / passes, add_up(again).seconds
    backward_s = (passes - 1) * max(pass_s, again_s)
    backward_s += max(pass_s, again_s + add_up([*scatters, copies]).seconds)
    end_s = gathers[-1].seconds + forward_s + backward_s + scatters[-1].seconds
    return end_s, [*passes * (gathers + again), *scatters, copies]


# ---- failures


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return the working time between checkpoints that loses least: Daly's higher-order estimate."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    x = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - cost_s


def useful_share(interval_s: float, cost_s: float, mtbf_s: float, restart_s: float) -> float:
    """Return the expected share of the time that is spent on steps that count.

    Times between failures are exponential with mean mtbf_s, in work, checkpoints and restarts alike. An interval
    and its checkpoint then take MTBF exp(restart / MTBF) (exp((interval + cost) / MTBF) - 1) on average (Daly).
    """
    exponent = restart_s / mtbf_s, (interval_s + cost_s) / mtbf_s
    if sum(exponent) > 700:
        return 0.0  # exp() would overflow: no interval is ever completed
    return interval_s / (mtbf_s * math.exp(exponent[0]) * math.expm1(exponent[1]))

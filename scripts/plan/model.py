"""What a step, a failure and a job cost at any size: arithmetic alone, without torch, clock or network.

The network is Hockney's: a message of n bytes takes alpha + n / bandwidth. All-reduces on top of it are those of
Thakur, Rabenseifner and Gropp 2005, https://doi.org/10.1177/1094342005051521 (ring), Sanders, Speck and Traeff
2009, https://doi.org/10.1016/j.parco.2009.09.001 (two binary trees), with hops within and between nodes counted as
NCCL's src/graph/tuning.cc does. Checkpoints: Young 1974, https://doi.org/10.1145/361147.361115, and Daly 2006,
https://doi.org/10.1016/j.future.2004.11.016. docs/plan.md says what all this leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from recipes.common.process.signals import vote_interval

FUSION_BYTES = 128 * 2**20
"""Horovod's fusion buffer (HOROVOD_FUSION_THRESHOLD): what has come up meanwhile travels together, up to this."""

CYCLE_S = 0.001
"""Horovod's HOROVOD_CYCLE_TIME: how often it looks for gradients."""

FORWARD_SHARE = 1 / 3
"""Of forward and backward: backward computes the gradients of inputs and weights, twice forward's arithmetic."""


# ---- the network


@dataclass(frozen=True)
class Link:
    """Hockney's two numbers, each way: what a message costs, and what its bytes cost."""

    alpha_s: float
    bytes_per_s: float

    def share(self, parts: int) -> Link:
        """Return what one of several users of the link has of it."""
        return Link(self.alpha_s, self.bytes_per_s / parts)


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal GPUs."""

    nodes: int
    gpus: int  # of a node; each has a rank
    network: Link  # between nodes: all ports of a node together
    intra: Link | None = None  # from one GPU of a node to the next; None: they reach each other as other nodes'
    loaded: Link | None = None  # between nodes while ranks compute, where the same cores also move the bytes

    @property
    def ranks(self) -> int:
        """The world size."""
        return self.nodes * self.gpus

    def split(self, size: int) -> tuple[Cluster, Cluster]:
        """Return a group of `size` neighbouring ranks, and the ranks that have the same place in each group.

        The groups of such ranks on a node share its network.
        """
        gpus = min(self.gpus, size)
        within = replace(self, nodes=max(1, size // gpus), gpus=gpus)
        link = self.network.share(gpus)
        return within, replace(self, nodes=self.nodes // within.nodes, gpus=self.gpus // gpus, network=link)

    def path_s(self, nbytes: float, between: int, within: int) -> float:
        """Return the time of so many hops between and within nodes, and of bytes over the slowest link."""
        intra = self.intra or self.network
        rates = [self.network.bytes_per_s] * (self.nodes > 1) + [intra.bytes_per_s] * (self.gpus > 1)
        return between * self.network.alpha_s + within * intra.alpha_s + (nbytes / min(rates) if rates else 0.0)

    def linked(self) -> Cluster:
        """Return the cluster with each GPU a node of its own, where those of a node have no link."""
        return (
            self if self.intra else replace(self, nodes=self.ranks, gpus=1, network=self.network.share(self.gpus))
        )


def ring_bytes(nbytes: float, ranks: int) -> float:
    """Return what a rank sends in a ring all-reduce: 2 (p-1)/p of the bytes."""
    return 2 * (ranks - 1) / ranks * nbytes


def ring_s(nbytes: float, ranks: int, link: Link) -> float:
    """Return the time of a ring all-reduce: 2 (p-1) hops, 2 (p-1)/p of the bytes over each link."""
    return 2 * (ranks - 1) * link.alpha_s + ring_bytes(nbytes, ranks) / link.bytes_per_s


def flat_ring_s(nbytes: float, cluster: Cluster) -> float:
    """Return the time of one ring through all GPUs, node by node: it enters and leaves each node once."""
    cluster = cluster.linked()
    hops, between = 2 * (cluster.ranks - 1), 2 * (cluster.nodes - 1)
    return cluster.path_s(ring_bytes(nbytes, cluster.ranks), between, hops - between)


def tree_s(nbytes: float, cluster: Cluster) -> float:
    """Return the time of an all-reduce up and down two binary trees of nodes, a chain of GPUs in each node.

    Each half of the bytes goes through its own tree, so that all links are busy: 2 n in all, and log2 of the nodes
    hops each way.
    """
    cluster = cluster.linked()
    return cluster.path_s(2 * nbytes, 2 * math.ceil(math.log2(cluster.nodes)), 2 * (cluster.gpus - 1))


def hierarchical_s(nbytes: float, cluster: Cluster) -> float:
    """Return the time of reduce-scatter in each node, rings between the nodes, all-gather in each node.

    Of g GPUs each exchanges 1/g of the bytes with its like on other nodes: a node's link carries what it does in
    a ring of nodes.
    """
    cluster = cluster.linked()
    within_s = ring_s(nbytes, cluster.gpus, cluster.intra or cluster.network)
    return within_s + ring_s(nbytes, cluster.nodes, cluster.network)


ALGORITHMS: dict[str, Callable[[float, Cluster], float]] = {
    "ring": flat_ring_s,
    "tree": tree_s,
    "hierarchical": hierarchical_s,
}


def fastest(nbytes: float, cluster: Cluster) -> str:
    """Return the faster of ring and tree for a message, which NCCL takes."""
    return min(("ring", "tree"), key=lambda name: ALGORITHMS[name](nbytes, cluster))


def all_reduce_s(nbytes: float, cluster: Cluster, algorithm: str = "auto") -> float:
    """Return the time of an all-reduce; auto takes the fastest()."""
    return ALGORITHMS[fastest(nbytes, cluster) if algorithm == "auto" else algorithm](nbytes, cluster)


def sent_per_node(nbytes: float, cluster: Cluster, algorithm: str = "auto") -> float:
    """Return the bytes that a node sends to others in an all-reduce (an average over nodes for the tree)."""
    if cluster.nodes == 1:
        return 0.0
    is_ring = (fastest(nbytes, cluster) if algorithm == "auto" else algorithm) == "ring"
    return ring_bytes(nbytes, cluster.ranks if is_ring else cluster.nodes)


# ---- what travels


@dataclass(frozen=True)
class Gradient:
    """One parameter's gradient."""

    shape: tuple[int, ...]
    ready: float  # the share of backward after which it is there
    itemsize: int = 4

    @property
    def numel(self) -> int:
        """Its numbers."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its bytes as it is computed."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Message:
    """Gradients that travel together."""

    ready: float  # the share of backward after which the last of them is there
    nbytes: float  # what is exchanged, compressed if they are


def in_buckets(
    gradients: Sequence[Gradient], cap_bytes: float, first_bytes: float | None = None
) -> list[list[Gradient]]:
    """Return DDP's buckets: filled in the order in which gradients come, closed once they have the size.

    The first one may have a size of its own.
    """
    buckets: list[list[Gradient]] = [[]]
    for gradient in gradients:
        limit = first_bytes if len(buckets) == 1 and first_bytes is not None else cap_bytes
        if sum(one.nbytes for one in buckets[-1]) >= limit:
            buckets.append([])
        buckets[-1].append(gradient)
    return [bucket for bucket in buckets if bucket]


def ddp_buckets(
    gradients: Sequence[Gradient], cap_bytes: float, factor: float = 1.0, first_bytes: float | None = None
) -> list[Message]:
    """Return what DDP exchanges: a message for each bucket.

    factor is that of the compression: 0.5 for half precision.
    """
    buckets = in_buckets(gradients, cap_bytes, first_bytes)
    return [Message(bucket[-1].ready, factor * sum(one.nbytes for one in bucket)) for bucket in buckets]


def powersgd_messages(bucket: Sequence[Gradient], rank: int) -> list[Message]:
    """Return what PowerSGD exchanges of a bucket once it is full: what it leaves whole, then both factors.

    A gradient of n x m numbers travels as (n + m) x rank where that is less than half of it.
    """
    whole = left = right = 0
    for gradient in bucket:
        rows = gradient.shape[0] if gradient.shape else 1
        columns = gradient.numel // rows
        if len(gradient.shape) > 1 and 2 * (rows + columns) * rank < rows * columns:
            left += rows * min(rank, rows, columns) * gradient.itemsize
            right += columns * min(rank, rows, columns) * gradient.itemsize
        else:
            whole += gradient.nbytes
    return [Message(bucket[-1].ready, nbytes) for nbytes in (whole, left, right) if nbytes]


# ---- a step


@dataclass(frozen=True)
class Compute:
    """What a rank computes in a step, in seconds, without any exchange."""

    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0
    load: float = 0.0  # the share of the device that an exchange under way takes from it: cores that both need
    fixed_share: float = 0.0  # of forward and backward: what fewer samples do not shorten, latencies of kernels

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.forward_s + self.backward_s + self.optimizer_s

    def scaled(self, factor: float) -> Compute:
        """Return that of `factor` times as many samples; the optimizer does not care for them."""
        share = self.fixed_share + factor * (1 - self.fixed_share)
        fixed_share = self.fixed_share / share if share else 0.0
        times = self.forward_s * share, self.backward_s * share
        return Compute(*times, self.optimizer_s, self.load, fixed_share)


def split_compute(seconds: float, fixed_s: float = 0.0) -> Compute:
    """Return forward and backward of a time that is known as a whole, fixed_s of it the same for any samples."""
    return Compute(seconds * FORWARD_SHARE, seconds * (1 - FORWARD_SHARE), fixed_share=fixed_s / seconds)


def exchanges_end_s(
    messages: Sequence[Message],
    cost: Callable[[float], float],
    compute: Compute,
    loaded_cost: Callable[[float], float] | None = None,
    fuse_bytes: float = 0.0,
) -> float:
    """Return when backward and all exchanges of a step are done; exchanges follow one another.

    Args:
        messages: in the order in which they can begin.
        cost: the time of an exchange of so many bytes when nothing is computed.
        compute: of the step; its load is what an exchange under way takes from backward.
        loaded_cost: the time of an exchange while backward goes on, where that is another.
        fuse_bytes: what has come up meanwhile goes together, up to so much; 0: each message by itself.
    """
    backward_s = compute.backward_s
    waiting = [(min(1.0, message.ready) * backward_s, message.nbytes) for message in messages]
    now, work = compute.forward_s, 0.0  # the time, and backward's seconds done
    left = nbytes = 0.0  # the share that is left of the exchange under way, and its bytes
    while work < backward_s or waiting or left:
        if not left and waiting and waiting[0][0] <= work + 1e-12:
            left, nbytes = 1.0, waiting.pop(0)[1]
            while waiting and waiting[0][0] <= work + 1e-12 and nbytes + waiting[0][1] <= fuse_bytes:
                nbytes += waiting.pop(0)[1]
        is_computing = work < backward_s
        own_s = (loaded_cost or cost)(nbytes) if is_computing else cost(nbytes)
        rate = 1 - compute.load if left else 1.0
        # Backward goes on until the next gradients are there, or until it ends.
        target = waiting[0][0] if waiting and waiting[0][0] > work else backward_s
        end_s = left * own_s if left else math.inf
        ready_s = (target - work) / rate if is_computing else math.inf
        passed = min(end_s, ready_s)
        now += passed
        if is_computing:
            work = target if passed == ready_s else work + passed * rate
        if left:
            left = 0.0 if passed == end_s else left - passed / own_s
    return now


@dataclass(frozen=True)
class Method:
    """How a recipe exchanges gradients."""

    recipe: str
    compression: str = "none"  # fp16, bf16 or powersgd
    powersgd_rank: int = 4
    bucket_bytes: float = 25 * 2**20
    first_bucket_bytes: float | None = None  # None: as the others
    waits: bool = False  # whether backward waits for each bucket's exchange, as PowerSGD's does over gloo
    allreduce: str = "ring"  # of scratch: ring or naive
    piece_bytes: int = 2**20
    zero: bool = False
    gathers: int = 2  # all-gathers of the weights that fsdp makes in a pass
    passes: int = 1  # of fsdp in a step: gradients are scattered after the last alone
    gathered_share: float = 1.0  # of the fp32 weights' bytes: 0.5 for bf16
    replicas: int = 1  # of fsdp: copies of the model, each in shards
    tensor_parallel: int = 1  # ranks of a replica of tensor
    sums: tuple[float, ...] = ()  # bytes of the all-reduces that its layers wait for, the first half forward
    algorithm: str = "auto"

    @property
    def factor(self) -> float:
        """What half precision leaves of the bytes."""
        return 0.5 if self.compression in ("fp16", "bf16") else 1.0


@dataclass(frozen=True)
class Step:
    """The times and bytes of a step of a rank."""

    step_s: float
    compute_s: float
    exchange_s: float  # all exchanges, were nothing computed meanwhile
    exposed_s: float  # what the exchanges add to computing
    sent_bytes_per_node: float  # to other nodes; the busiest node's, where they differ
    limit: str  # compute, exchange, vote or input: what to improve first


def step(
    gradients: Sequence[Gradient],
    compute: Compute,
    cluster: Cluster,
    method: Method,
    control_alpha_s: float = 0.0,
    input_s: float = 0.0,
) -> Step:
    """Return a step's times and bytes.

    Args:
        gradients: in the order in which backward yields them.
        compute: of one rank.
        cluster: its nodes and links.
        method: how gradients are exchanged.
        control_alpha_s: a hop of the vote on stopping, which goes around a ring of all ranks beside backward.
        input_s: the time in which a step's samples can be read and decoded, beside everything else.
    """
    end_s, exchange_s, sent = _exchange(gradients, compute, cluster, method)
    if method.zero:
        # Each rank hands out its share of the new weights: an all-gather, half an all-reduce.
        weights = sum(gradient.nbytes for gradient in gradients)
        gather_s = flat_ring_s(weights, cluster) / 2
        end_s, exchange_s = end_s + gather_s, exchange_s + gather_s
        sent += sent_per_node(weights, cluster, "ring") / 2
    exposed_s = end_s - compute.forward_s - compute.backward_s
    vote_s = 2 * (cluster.ranks - 1) * control_alpha_s
    vote_wait_s = max(0.0, vote_s - end_s) / vote_interval(cluster.ranks)
    done_s = end_s + vote_wait_s + compute.optimizer_s
    total_s = max(done_s, input_s)
    limit = "compute" if exposed_s < 0.05 * total_s else "exchange"
    if vote_wait_s > max(exposed_s, 0.05 * total_s):
        limit = "vote"
    if input_s > done_s:
        limit = "input"
    return Step(total_s, compute.total_s, exchange_s, exposed_s, sent, limit)


def _exchange(
    gradients: Sequence[Gradient], compute: Compute, cluster: Cluster, method: Method
) -> tuple[float, float, float]:
    """Return when a recipe's exchange is done, its time by itself, and the bytes that a node sends."""

    def cost(nbytes: float) -> float:
        return all_reduce_s(nbytes, cluster, method.algorithm)

    def loaded_cost(nbytes: float) -> float:
        busy = replace(cluster, network=cluster.loaded or cluster.network)
        return all_reduce_s(nbytes, busy, method.algorithm)

    loaded = loaded_cost if cluster.loaded else None
    computed_s = compute.forward_s + compute.backward_s
    whole = sum(gradient.nbytes for gradient in gradients)
    if cluster.ranks == 1 or method.recipe == "single":
        return computed_s, 0.0, 0.0
    if method.recipe == "dataparallel":
        # The first GPU hands the weights out to each of the others and collects their gradients.
        link = cluster.intra or cluster.network
        exchange_s = 2 * (cluster.gpus - 1) * (link.alpha_s + whole / link.bytes_per_s)
        return computed_s + exchange_s, exchange_s, 0.0
    if method.recipe == "scratch":
        exchange_s, sent = _by_hand(whole, cluster, method)
        return computed_s + exchange_s, exchange_s, sent
    if method.recipe == "fsdp":
        return _by_shards(gradients, compute, cluster, method)
    if method.recipe == "tensor":
        return _by_layers(gradients, compute, cluster, method)
    if method.recipe == "horovod":
        messages = ddp_buckets(gradients, FUSION_BYTES, method.factor)
        single = [Message(gradient.ready, gradient.nbytes * method.factor) for gradient in gradients]
        end_s = exchanges_end_s(single, lambda n: cost(n) + CYCLE_S, compute, loaded, FUSION_BYTES)
    else:
        sizes = method.bucket_bytes, method.first_bucket_bytes
        messages = ddp_buckets(gradients, sizes[0], method.factor, sizes[1])
        if method.compression == "powersgd":
            buckets = in_buckets(gradients, *sizes)
            messages = [one for bucket in buckets for one in powersgd_messages(bucket, method.powersgd_rank)]
        end_s = exchanges_end_s(messages, cost, compute, loaded)
        if method.waits:
            end_s = computed_s + sum(cost(message.nbytes) for message in messages)
    sent = sum(sent_per_node(message.nbytes, cluster, method.algorithm) for message in messages)
    return end_s, sum(cost(message.nbytes) for message in messages), sent


def _by_shards(
    gradients: Sequence[Gradient], compute: Compute, cluster: Cluster, method: Method
) -> tuple[float, float, float]:
    """Return the same for fsdp: half an all-reduce for each gather and reduce-scatter of a block.

    Blocks are taken to be as large as DDP's buckets. The next block's weights arrive while one computes; the first
    block's are waited for, and the last block's gradients.
    """
    within, across = cluster.split(cluster.ranks // min(method.replicas, cluster.ranks))
    sizes = [message.nbytes for message in ddp_buckets(gradients, method.bucket_bytes)]
    gathers = [flat_ring_s(method.gathered_share * size, within) / 2 for size in sizes]
    scatters = [flat_ring_s(size, within) / 2 for size in sizes]
    # Each shard's gradients are averaged with those of its copies, all shards of a node at once.
    shard = sum(sizes) / within.ranks
    copies_s = all_reduce_s(shard, across, method.algorithm)
    count = method.passes * method.gathers
    sent = (count * method.gathered_share + 1) * sent_per_node(sum(sizes), within, "ring") / 2
    sent += within.gpus * sent_per_node(shard, across, method.algorithm)
    exchange_s = count * sum(gathers) + sum(scatters) + copies_s
    forward_s = max(compute.forward_s, method.passes * sum(gathers))
    backward_s = max(compute.backward_s, (count - method.passes) * sum(gathers) + sum(scatters) + copies_s)
    return gathers[-1] + forward_s + backward_s + scatters[-1], exchange_s, sent


def _by_layers(
    gradients: Sequence[Gradient], compute: Compute, cluster: Cluster, method: Method
) -> tuple[float, float, float]:
    """Return the same for tensor: layers wait for sums within a replica; gradients travel beside backward."""
    within, across = cluster.split(method.tensor_parallel)
    times = [all_reduce_s(nbytes, within, method.algorithm) for nbytes in method.sums]
    forward_s, backward_s = sum(times[: len(times) // 2]), sum(times[len(times) // 2 :])
    busy = replace(compute, forward_s=compute.forward_s + forward_s, backward_s=compute.backward_s + backward_s)
    messages = ddp_buckets(gradients, method.bucket_bytes)

    def cost(nbytes: float) -> float:
        return all_reduce_s(nbytes, across, method.algorithm)

    sent = sum(sent_per_node(nbytes, within, method.algorithm) for nbytes in method.sums)
    sent += within.gpus * sum(sent_per_node(one.nbytes, across, method.algorithm) for one in messages)
    exchange_s = forward_s + backward_s + sum(cost(message.nbytes) for message in messages)
    return exchanges_end_s(messages, cost, busy), exchange_s, sent


def _by_hand(whole: float, cluster: Cluster, method: Method) -> tuple[float, float]:
    """Return time and bytes sent per node of the scratch recipe, which begins when backward is done."""
    if method.allreduce == "naive":
        # All gradients go to rank 0 one after another, and the sum back to all: its node sends the most.
        pieces = math.ceil(whole / method.piece_bytes)
        far, near = (cluster.nodes - 1) * cluster.gpus, cluster.gpus - 1
        links = ((far, cluster.network), (near, cluster.intra or cluster.network))
        seconds = sum(times * (pieces * link.alpha_s + whole / link.bytes_per_s) for times, link in links)
        return 2 * seconds, far * whole
    # A ring like any other, but each hop is several messages: pieces of a chunk, two at the least.
    pieces = max(2, math.ceil(whole / cluster.ranks / method.piece_bytes))
    seconds = flat_ring_s(whole, cluster) + (pieces - 1) * flat_ring_s(0, cluster)
    return seconds, sent_per_node(whole, cluster, "ring")


# ---- failures


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return the time of work between checkpoints that loses least: Daly's higher-order estimate."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    x = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - cost_s


def useful_share(interval_s: float, cost_s: float, mtbf_s: float, restart_s: float) -> float:
    """Return the expected share of the time that goes into steps that count.

    Failures are exponential with mean mtbf_s, in work, checkpoints and restarts alike. An interval and its
    checkpoint then take MTBF exp(restart / MTBF) (exp((interval + cost) / MTBF) - 1) in the mean: Daly 2006.
    """
    exponent = restart_s / mtbf_s, (interval_s + cost_s) / mtbf_s
    if sum(exponent) > 700:
        return 0.0  # exp() would not fit a float: no interval is ever done
    return interval_s / (mtbf_s * math.exp(exponent[0]) * math.expm1(exponent[1]))

"""The faults of the drill: how each is planted in a running job, and what the job is to do then."""

from __future__ import annotations

import resource
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from scripts.lab import network

if TYPE_CHECKING:
    from scripts.drill.trial import Trial

LIBRARY = "drill-clock.so"
USED_BYTES = 10_000
"""More than heartbeats send in a few seconds; a step of a job sends a hundred times as much."""

CATCH_S = 60.0
"""For a checkpoint that is being written."""

ERROR, STOPPED, RIDES, ROUNDS = "error", "stopped", "rides", "rounds"
"""The job ends with an error and is started again; it writes a checkpoint, ends with status 0 and is started
again; it goes on as if nothing had been; it goes on with the nodes that are left (an elastic job)."""


@dataclass(frozen=True)
class Fault:
    """A fault: plant(trial) breaks something in trial.job and returns what it broke, in words."""

    name: str
    plant: Callable[[Trial], str]
    then: str
    needs: str = ""
    """network, loss, rate or cc: what a machine has to have for it."""
    timeout_s: float = 6.0
    """--timeout-s: how long a rank waits for another."""
    intervals: int = 1
    """As many checkpoint intervals may be lost."""
    recipe: str = "ddp"
    options: tuple[str, ...] = ()
    """Of its job, besides those of all."""

    @property
    def model(self) -> str:
        """The model of the job.

        Another world size adds gradients up in another order: a difference in the last bit. A ReLU or a maximum
        can tip over by that, and the losses are others in the fifth digit; a smooth model has neither.
        """
        return "vit-tiny" if self.then == ROUNDS else "lenet"


class NotPlantedError(Exception):
    """The job was not hit by the fault, so that it has survived nothing; the message says why."""


def send_all(processes: Iterable[psutil.Process], number: signal.Signals, whom: str) -> None:
    """Send a signal to processes; raises NotPlantedError where none of them is there any more."""
    if not sum(send(process, number) for process in [*processes]):
        raise NotPlantedError(f"{whom} had ended")


def kill_rank(trial: Trial) -> str:
    """A rank is killed, as the kernel does when memory runs out."""
    rank, process = trial.pick_rank()
    send_all([process], signal.SIGKILL, f"rank {rank}")
    return f"rank {rank}"


def kill_agent(trial: Trial) -> str:
    """A node's agent is killed; the kernel ends its ranks with it."""
    return kill_on_node(trial, "scripts.launch.agent")


def kill_on_node(trial: Trial, module: str) -> str:
    """Kill a node's processes of a module."""
    node = trial.pick_node()
    send_all(trial.job.of_node(node, f"-m {module}"), signal.SIGKILL, f"{module} of node {node}")
    return f"node {node}"


def stop_rank(trial: Trial) -> str:
    """A rank hangs: it lives, and does nothing."""
    rank, process = trial.pick_rank()
    send_all([process], signal.SIGSTOP, f"rank {rank}")
    return f"rank {rank}"


def pick_link(trial: Trial) -> int:
    """Draw a node whose link the job uses, to be restored at the end; raises NotPlantedError where it does not."""
    node = trial.pick_node()
    before = trial.network.sent_bytes(node)
    if not trial.job.wait_for(lambda: trial.network.sent_bytes(node) > before + USED_BYTES, 5):
        raise NotPlantedError(f"the job does not use the link of node {node}")
    trial.repairs.append(lambda: trial.network.restore(node))
    return node


def cut_10_s(trial: Trial) -> str:
    """A node's link is down for 10 s, less than --timeout-s."""
    victim = cut(trial)
    time.sleep(2)  # for the step that was under way
    step = trial.steps.last()
    time.sleep(8)
    if trial.steps.last() != step:
        raise NotPlantedError("the job went on without the link")
    trial.repair()
    return victim


def cut(trial: Trial) -> str:
    """A node's link is down until the job has ended."""
    node = pick_link(trial)
    trial.network.cut(node)
    return f"node {node}"


def lose_packets(trial: Trial) -> str:
    """A node's link loses 5% of its packets each way until the job has ended."""
    node = pick_link(trial)
    return f"node {node}, by {trial.network.lose(node, 0.05)}"


def narrow(trial: Trial) -> str:
    """A node's link becomes slow until the job has ended."""
    node = pick_link(trial)
    trial.network.narrow(node, "50mbit")
    return f"node {node}, 50 Mbit/s"


def fill_disk(trial: Trial) -> str:
    """The disk is full at the next checkpoint: a small tmpfs, else a limit on the size of files."""
    if trial.is_small_disk:
        filler = trial.runs_dir / "filler"
        with open(filler, "wb") as file:
            file.write(bytes(max(0, shutil.disk_usage(trial.runs_dir).free - 4096)))
        trial.repairs.append(filler.unlink)
        return "tmpfs"
    size = max(path.stat().st_size for path in trial.run_dir.glob("checkpoints/*.pt"))
    for process in trial.job.ranks():  # the record grows by less than a checkpoint holds
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size // 2, size // 2))
    return "RLIMIT_FSIZE"


def truncate(trial: Trial) -> str:
    """All is killed, and the newest checkpoint has lost its end."""
    trial.job.kill()
    newest = max(trial.run_dir.glob("checkpoints/step-*.pt"))
    size = newest.stat().st_size
    kept = trial.chance.randrange(size)
    with open(newest, "r+b") as file:
        file.truncate(kept)
    return f"{newest.name}, {kept} of {size} bytes kept"


def jump_clock(trial: Trial) -> str:
    """A node's wall clock jumps: for its processes alone, by a preloaded library (scripts/drill/clock.c)."""
    node, offset = trial.pick_node(), trial.chance.choice((-86400.0, -3600.0, 3600.0, 86400.0))
    ranks = trial.job.of_node(node, f"-m recipes.{trial.fault.recipe}.train")
    if not any(LIBRARY in Path(f"/proc/{rank.pid}/maps").read_text() for rank in ranks):
        raise NotPlantedError(f"no rank of node {node} has loaded {LIBRARY}")
    with open(trial.clock, "r+b") as file:
        file.seek(8 * node)
        file.write(struct.pack("d", offset))
    return f"node {node}, {offset / 3600:+.0f} h"


def storm(trial: Trial) -> str:
    """USR1 comes to every process of the job, again and again for a second."""
    end = time.monotonic() + 1
    sent = 0
    targets = [*trial.job.processes("-m scripts."), *trial.job.ranks()]
    while time.monotonic() < end:
        sent += sum(send(process, signal.SIGUSR1) for process in targets)
        time.sleep(0.02)
    if not sent:
        raise NotPlantedError("the job had ended")
    return f"{sent} signals"


def preempt_in_checkpoint(trial: Trial) -> str:
    """TERM comes while a checkpoint is being written, and KILL for all a moment later."""
    folder = trial.run_dir / "checkpoints"
    if not trial.job.wait_for(lambda: any(folder.glob("*.tmp")), CATCH_S):
        raise NotPlantedError("no checkpoint was caught while it was written")
    trial.planted = time.monotonic()
    trial.job.process.terminate()
    grace_s = trial.chance.choice((0.0, 0.0, trial.chance.random()))
    time.sleep(grace_s)
    trial.job.kill()
    return f"KILL {grace_s:.2f} s later"


def kill_in_save(trial: Trial) -> str:
    """A rank is killed once its shard file is begun, before a marker makes the files of all ranks a checkpoint."""
    folder = trial.run_dir / "checkpoints"
    rank, process = trial.pick_rank()

    def unfinished() -> str:
        """Return the checkpoint of which there is this rank's file and no marker yet."""
        newest = max((path.stem for path in folder.glob("step-*.pt")), default="")
        begun = max((path.name[:14] for path in folder.glob(f"step-*-{rank:05d}-*.shard")), default="")
        return begun if begun > newest else ""

    while trial.job.wait_for(lambda: bool(unfinished()), CATCH_S):
        send(process, signal.SIGSTOP)
        time.sleep(0.5)  # where this rank was done, the marker comes now
        if name := unfinished():
            trial.planted = time.monotonic()
            send(process, signal.SIGKILL)
            return f"rank {rank}, before {name}.pt"
        send(process, signal.SIGCONT)
    raise NotPlantedError("no checkpoint was caught while it was written")


def two_at_once(trial: Trial) -> str:
    """Two faults at once, of those that need no network."""
    drawn = trial.chance.sample((kill_rank, kill_agent, stop_rank, storm), 2)
    # A storm lasts a second, in which the job may end: what comes after it would come too late.
    first, second = sorted(drawn, key=lambda fault: fault is storm)
    return f"{first.__name__} {first(trial)}, {second.__name__} {second(trial)}".replace("_", "-")


def lose_node(trial: Trial) -> str:
    """A node of an elastic job is killed for good."""
    return kill_on_node(trial, "scripts.launch.rejoin")


def stop_node(trial: Trial) -> str:
    """All processes of a node hang, until the others have gone on."""
    node = trial.pick_node()
    stopped = trial.job.of_node(node, "")
    send_all(stopped, signal.SIGSTOP, f"node {node}")
    trial.repairs.append(lambda: [send(process, signal.SIGCONT) for process in stopped])
    return f"node {node}"


def send(process: psutil.Process, number: signal.Signals) -> int:
    """Send a signal; return how many have gone out, for a process may have ended."""
    try:
        process.send_signal(number)
    except psutil.Error:
        return 0
    return 1


SHARDED = ("--sharded-checkpoints",)
"""Of fsdp, whose ranks then write a file each."""

FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill-rank", kill_rank, ERROR),
        Fault("kill-agent", kill_agent, ERROR),
        Fault("stop-rank", stop_rank, ERROR),
        Fault("cut-10s", cut_10_s, RIDES, needs="network", timeout_s=40),
        Fault("cut", cut, ERROR, needs="network"),
        Fault("loss", lose_packets, RIDES, needs="loss", timeout_s=40),
        Fault("narrow", narrow, RIDES, needs="rate", timeout_s=40),
        Fault("disk-full", fill_disk, ERROR),
        Fault("truncate", truncate, ERROR, intervals=2),
        Fault("clock", jump_clock, RIDES, needs="cc"),
        Fault("usr1-storm", storm, STOPPED),
        Fault("preempt", preempt_in_checkpoint, ERROR),
        Fault("kill-shard", kill_in_save, ERROR, timeout_s=20, intervals=2, recipe="fsdp", options=SHARDED),
        Fault("two", two_at_once, ERROR),
        Fault("lose-rank", kill_rank, ROUNDS),
        Fault("lose-agent", kill_agent, ROUNDS),
        Fault("lose-node", lose_node, ROUNDS),
        Fault("lose-shards", lose_node, ROUNDS, recipe="fsdp", options=SHARDED),
        Fault("stop-node", stop_node, ROUNDS),
        Fault("cut-node", cut, ROUNDS, needs="network"),
    )
}


def why_not(fault: Fault, has_network: bool) -> str:
    """Return why a fault cannot be planted here, "" if it can."""
    if fault.needs in ("network", "loss", "rate") and not has_network:
        return network.why_not() or "no network for each node (--plain)"
    if fault.needs == "loss" and not network.can_lose():
        return "neither netem nor iptables' random drop is there"
    if fault.needs == "rate" and not network.can_narrow():
        return "tc has no tbf here"
    if fault.needs == "cc" and not shutil.which("cc"):
        return "the clock's shift needs a C compiler (cc)"
    return ""


def build_clock(folder: str) -> str:
    """Compile the library that shifts the clock; return its path."""
    library = f"{folder}/{LIBRARY}"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, "scripts/drill/clock.c"], check=True)
    return library

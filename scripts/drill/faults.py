"""The faults of the drill: how each is planted in a running job, and what the job is to do then."""

from __future__ import annotations

import functools
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

from scripts.lab import network

if TYPE_CHECKING:
    import psutil

    from scripts.drill.trial import Trial

LIBRARY = "drill-clock.so"
USED_BYTES = 10_000
"""More than heartbeats send in a few seconds; one step of a job sends a hundred times as much."""

CATCH_S = 60.0
"""Time limit for catching a checkpoint while it is written."""
NOT_CAUGHT = "not planted: no checkpoint was caught while it was written"

ERROR, STOPPED, RIDES, STAYS, ROUNDS = "error", "stopped", "rides", "stays", "rounds"
"""What the job has to do: end with an error and be restarted; write a checkpoint, end with status 0 and be
restarted; continue as if nothing had happened; the same, of an elastic job; continue with the remaining nodes (an
elastic job)."""


@dataclass(frozen=True)
class Fault:
    """A fault: plant(trial) breaks something in trial.job and returns a text that says what."""

    plant: Callable[[Trial], str]
    then: str
    needs: str = ""  # what the machine has to have for it: network, loss, rate or cc
    timeout_s: float = 6.0  # --timeout-s: how long a rank waits for another
    intervals: int = 1  # number of checkpoint intervals that may be lost
    recipe: str = "ddp"  # or fsdp with sharded checkpoints, where each rank writes its own file

    @property
    def is_elastic(self) -> bool:
        """Whether the job is elastic."""
        return self.then in (STAYS, ROUNDS)

    @property
    def model(self) -> str:
        """The model of the job: a smooth one if the world size may change.

        Another world size adds gradients in another order, which changes their last bit. A ReLU or a maximum can
        flip because of that, and losses then differ in the fifth digit; a smooth model has neither.
        """
        return "vit-tiny" if self.is_elastic else "lenet"


class NotSurvivedError(Exception):
    """The job did not do what it has to do, or the fault did not hit it; the message gives details."""


def expect(holds: object, otherwise: str) -> None:
    """Raise NotSurvivedError(otherwise) if a condition of a job's survival, or of planting a fault, is false."""
    if not holds:
        raise NotSurvivedError(otherwise)


def send(process: psutil.Process, number: signal.Signals) -> bool:
    """Send a signal; return False if that failed, because the process may have ended."""
    import psutil  # here, as scripts/make.py reads FAULTS before .venv exists

    try:
        process.send_signal(number)
    except psutil.Error:
        return False
    return True


def send_all(processes: Iterable[psutil.Process], number: signal.Signals, whom: str) -> str:
    """Send a signal to processes and return `whom`; raises NotSurvivedError if all of them have ended."""
    expect(sum(send(process, number) for process in processes), f"not planted: {whom} had ended")
    return whom


def signal_rank(number: signal.Signals, trial: Trial) -> str:
    """Kill a rank, as the kernel does when memory runs out, or stop it: it is alive, but hangs."""
    rank, process = trial.pick_rank()
    return send_all([process], number, f"rank {rank}")


def kill_on_node(module: str, trial: Trial) -> str:
    """Kill a node's agent, or the process that keeps the node in an elastic job; the kernel ends all below it."""
    node = trial.pick_node()
    send_all(trial.job.of_node(node, f"-m {module}"), signal.SIGKILL, f"{module} of node {node}")
    return f"node {node}"


def stop_node(trial: Trial) -> str:
    """Stop all processes of a node until the other nodes have continued."""
    node = trial.pick_node()
    stopped = trial.job.of_node(node)
    trial.repairs.append(lambda: [send(process, signal.SIGCONT) for process in stopped])
    return send_all(stopped, signal.SIGSTOP, f"node {node}")


def pick_link(trial: Trial) -> int:
    """Draw a node whose link is restored at the end; raises NotSurvivedError if the job does not use the link."""
    node = trial.pick_node()
    before = trial.network.sent_bytes(node)
    is_used = trial.job.wait_for(lambda: trial.network.sent_bytes(node) > before + USED_BYTES, 5)
    expect(is_used, f"not planted: the job does not use the link of node {node}")
    trial.repairs.append(lambda: trial.network.restore(node))
    return node


def cut_10_s(trial: Trial) -> str:
    """Cut a node's link for 10 s, less than --timeout-s."""
    victim = cut(trial)
    time.sleep(2)  # for the step that is under way
    step = trial.steps.last()
    time.sleep(8)
    expect(trial.steps.last() == step, "not planted: the job continued without the link")
    trial.repair()
    return victim


def cut(trial: Trial) -> str:
    """Cut a node's link until the job, or its elastic round, has ended."""
    node = pick_link(trial)
    trial.network.cut(node)
    return f"node {node}"


def lose_packets(trial: Trial) -> str:
    """Make a node's link lose 5% of its packets in each direction until the job has ended."""
    node = pick_link(trial)
    return f"node {node}, by {trial.network.lose(node, 0.05)}"


def narrow(trial: Trial) -> str:
    """Slow down a node's link until the job has ended."""
    node = pick_link(trial)
    trial.network.narrow(node, 50)
    return f"node {node}, 50 Mbit/s"


def fill_disk(trial: Trial) -> str:
    """Make the disk full at the next checkpoint: by a small tmpfs, else by a limit on the size of files."""
    if trial.is_small_disk:
        filler = trial.runs_dir / "filler"
        filler.write_bytes(bytes(max(0, shutil.disk_usage(trial.runs_dir).free - 4096)))
        trial.repairs.append(filler.unlink)
        return "tmpfs"
    size = max(path.stat().st_size for path in trial.run_dir.glob("checkpoints/*.pt"))
    for process in trial.job.ranks().values():  # the record's files are smaller than that
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size // 2, size // 2))
    return "RLIMIT_FSIZE"


def truncate(trial: Trial) -> str:
    """Kill the job, and truncate its newest checkpoint."""
    trial.job.kill()
    newest = max(trial.run_dir.glob("checkpoints/step-*.pt"))
    content = newest.read_bytes()
    kept = trial.chance.randrange(len(content))
    newest.write_bytes(content[:kept])
    return f"{newest.name}, {kept} of {len(content)} bytes kept"


def prepare_clock(folder: Path) -> dict[str, str]:
    """Compile the library that shifts a node's clock; return the variables that make a job load it."""
    library, offsets = folder / LIBRARY, folder / "clock"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, "scripts/drill/clock.c"], check=True)
    offsets.write_bytes(bytes(4096))
    return {"LD_PRELOAD": str(library), "DRILL_CLOCK": str(offsets)}


def jump_clock(trial: Trial) -> str:
    """Shift the wall clock of a node's processes, by a preloaded library (scripts/drill/clock.c).

    The job is elastic: its agents compare the times of their heartbeats.
    """
    node, offset = trial.pick_node(), trial.chance.choice((-86400.0, -3600.0, 3600.0, 86400.0))
    agents = trial.job.of_node(node, "-m scripts.launch.agent")
    is_loaded = any(LIBRARY in Path(f"/proc/{agent.pid}/maps").read_text() for agent in agents)
    expect(is_loaded, f"not planted: no agent of node {node} has loaded {LIBRARY}")
    with open(trial.env["DRILL_CLOCK"], "r+b") as file:
        file.seek(8 * node)
        file.write(struct.pack("d", offset))
    return f"node {node}, {offset / 3600:+.0f} h"


def storm(trial: Trial) -> str:
    """Send USR1 to every process of the job, again and again for a second."""
    targets = [*trial.job.processes("-m scripts."), *trial.job.ranks().values()]
    end, sent = time.monotonic() + 1, 0
    while time.monotonic() < end:
        sent += sum(send(process, signal.SIGUSR1) for process in targets)
        time.sleep(0.02)
    expect(sent, "not planted: the job had ended")
    return f"{sent} signals"


def preempt_in_checkpoint(trial: Trial) -> str:
    """Send TERM while a checkpoint is being written, and KILL to all processes a moment later."""
    folder = trial.run_dir / "checkpoints"
    expect(trial.job.wait_for(lambda: any(folder.glob("*.tmp")), CATCH_S), NOT_CAUGHT)
    trial.planted = time.monotonic()
    trial.job.process.terminate()
    grace_s = trial.chance.choice((0.0, 0.0, trial.chance.random()))
    time.sleep(grace_s)
    trial.job.kill()
    return f"KILL {grace_s:.2f} s later"


def kill_in_save(trial: Trial) -> str:
    """Kill a rank that has begun its shard file, before the marker that makes all ranks' files a checkpoint."""
    folder = trial.run_dir / "checkpoints"
    rank, process = trial.pick_rank()

    def unfinished() -> str:
        """Return the checkpoint that has this rank's file, but no marker yet."""
        newest = max((path.stem for path in folder.glob("step-*.pt")), default="")
        begun = max((path.name[:14] for path in folder.glob(f"step-*-{rank:05d}-*.shard")), default="")
        return begun if begun > newest else ""

    while trial.job.wait_for(lambda: bool(unfinished()), CATCH_S):
        send(process, signal.SIGSTOP)
        time.sleep(0.5)  # if this rank was done, the marker comes now
        if name := unfinished():
            trial.planted = time.monotonic()
            send(process, signal.SIGKILL)
            return f"rank {rank}, before {name}.pt"
        send(process, signal.SIGCONT)
    raise NotSurvivedError(NOT_CAUGHT)


def two_at_once(trial: Trial) -> str:
    """Plant two faults at once, of those that need no network."""
    drawn = trial.chance.sample(("kill-rank", "kill-agent", "stop-rank", "usr1-storm"), 2)
    # A storm comes last: the job may end within the second that it takes.
    drawn.sort(key=lambda name: name == "usr1-storm")
    return ", ".join(f"{name} {FAULTS[name].plant(trial)}" for name in drawn)


kill_rank = functools.partial(signal_rank, signal.SIGKILL)
stop_rank = functools.partial(signal_rank, signal.SIGSTOP)
kill_agent = functools.partial(kill_on_node, "scripts.launch.agent")
lose_node = functools.partial(kill_on_node, "scripts.launch.rejoin")

FAULTS = {
    "kill-rank": Fault(kill_rank, ERROR),
    "kill-agent": Fault(kill_agent, ERROR),
    "stop-rank": Fault(stop_rank, ERROR),
    "cut-10s": Fault(cut_10_s, RIDES, needs="network", timeout_s=40),
    "cut": Fault(cut, ERROR, needs="network"),
    "loss": Fault(lose_packets, RIDES, needs="loss", timeout_s=40),
    "narrow": Fault(narrow, RIDES, needs="rate", timeout_s=40),
    "disk-full": Fault(fill_disk, ERROR),
    "truncate": Fault(truncate, ERROR, intervals=2),
    "clock": Fault(jump_clock, STAYS, needs="cc"),
    "usr1-storm": Fault(storm, STOPPED),
    "preempt": Fault(preempt_in_checkpoint, ERROR),
    "kill-shard": Fault(kill_in_save, ERROR, timeout_s=20, intervals=2, recipe="fsdp"),
    "two": Fault(two_at_once, ERROR),
    "lose-rank": Fault(kill_rank, ROUNDS),
    "lose-agent": Fault(kill_agent, ROUNDS),
    "lose-node": Fault(lose_node, ROUNDS),
    "lose-shards": Fault(lose_node, ROUNDS, recipe="fsdp"),
    "stop-node": Fault(stop_node, ROUNDS),
    "cut-node": Fault(cut, ROUNDS, needs="network"),
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

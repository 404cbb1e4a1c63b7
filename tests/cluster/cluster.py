"""A real Slurm cluster for tests, and what they ask of it: submit a file, wait for a job, read what it printed."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from scripts.drill.job import find_processes
from tests.support import ROOT, TIMEOUT_S, launches, wait_until

FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}

GPU_FAULT = """
import os, socket, sys, time
if socket.gethostname() == "n2":
    us = int(time.clock_gettime(time.CLOCK_BOOTTIME) * 1e6)
    with open(os.environ["KMSG"], "a") as log:  # of the node's own, as the kernel's log is
        log.write(f"3,1,{us};NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\\n")
    sys.exit(1)
print("trains", flush=True)
while os.environ["RESUME"] == "none":
    time.sleep(0.1)
"""
"""A script whose GPU on n2 falls off the bus; it succeeds once it is told to resume."""


@dataclass(frozen=True)
class Cluster:
    """A cluster that scripts/lab/slurm_cluster.sh runs in a folder."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that put the cluster's commands into PATH."""
        return {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", "SLURM_CLUSTER_DIR": str(self.folder)}

    def script(self, *words: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
        """Run scripts/lab/slurm_cluster.sh."""
        # Slurm variables that a launcher or user has set around the tests must not reach the jobs.
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        own |= {"SLURM_CLUSTER_DIR": str(self.folder), "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "1000"}
        own |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **env}
        command = [str(ROOT / "scripts/lab/slurm_cluster.sh"), *words]
        return subprocess.run(command, cwd=cwd, env=own, capture_output=True, text=True, timeout=TIMEOUT_S)

    def run(self, *words: str, cwd: Path = ROOT, **env: str) -> str:
        """Run a Slurm command; return its output."""
        result = self.script("run", *words, cwd=cwd, **env)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def submit(self, folder: Path, file: str, *options: str, flags: tuple[str, ...] = (), **env: str) -> Job:
        """Submit a file of slurm/ from a folder, which gets the record and the logs."""
        words = ["sbatch", "--parsable", *flags, str(ROOT / "slurm" / file)]
        own = ["--runs-dir", str(folder), *([] if file.startswith("doctor") else ["--no-tensorboard"])]
        device = ["--device", "cpu"]  # Slurm counts GPUs here that do not exist
        if "SCRIPT" in env:
            own, device, env = [], [], {"RUNS_DIR": str(folder), **env}
        number = self.run(*words, *options, *device, *own, cwd=folder, **env).strip()
        return Job(self, number, folder)

    def processes(self, text: str = "", node: str | None = None) -> list[psutil.Process]:
        """Return the cluster's processes with the text in their command line, on a node or on all."""
        found = find_processes(text, SLURM_CONF=str(self.folder / "slurm.conf"))
        return [process for process in found if node is None or self.host_of(process) == node]

    def wait_for_idle(self, node: str) -> None:
        """Wait until Slurm can give a node to a job."""
        command = ("sinfo", "-h", "-n", node, "-p", "main", "-o", "%T")
        wait_until(lambda: self.run(*command).strip() == "idle", TIMEOUT_S, f"{node} idle again")

    def host_of(self, process: psutil.Process) -> str:
        """Return the host name that a process sees."""
        command = ["nsenter", "--target", str(process.pid), "--uts", "hostname"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()


@dataclass(frozen=True)
class Job:
    """A job, or one task of an array."""

    cluster: Cluster
    number: str
    folder: Path
    """The folder in which it was submitted, and which has its record."""

    def field(self, name: str) -> str:
        """Return a field of scontrol show job."""
        return self.fields(name)[0]

    def fields(self, *names: str) -> list[str]:
        """Return several fields from one call, so that they are consistent."""
        line = self.cluster.run("scontrol", "--oneliner", "show", "job", self.number)
        found = [re.search(rf" {name}=(\S*)", line) for name in names]
        assert all(found), line
        return [match[1] for match in found if match]

    @property
    def text(self) -> str:
        """Output of the batch script so far, with the head node's output."""
        [path] = [*self.folder.glob(f"*-{self.number}.out")] or [Path(os.devnull)]
        return path.read_text()

    @property
    def run(self) -> Path:
        """The folder of the record."""
        match = re.search(r"record and logs in (\S+)", self.text)
        assert match, self.text
        return Path(match[1])

    def wait_for_text(self, text: str) -> None:
        """Wait until the batch script or the head node has printed the text."""
        wait_until(lambda: text in self.text, TIMEOUT_S, lambda: f"{text!r} in:\n{self.text}")

    def wait(self, timeout_s: float = TIMEOUT_S) -> str:
        """Wait for the job's end; return its state. No process of it may be left over."""
        wait_until(self.has_ended, timeout_s, lambda: f"an end of:\n{self.text}")
        state = self.field("JobState")
        mark = f"job{self.number}"
        wait_until(lambda: not self.cluster.processes(mark), 10, f"no process of {mark} left")
        return state

    def has_ended(self) -> bool:
        """Return whether the job has ended and is not about to be requeued."""
        state, requeue = self.fields("JobState", "Requeue")
        return state in FINAL and requeue != "pending"

    def complete(self, timeout_s: float = TIMEOUT_S) -> str:
        """Wait until the job completes; return the last line, which should be the result line."""
        state = self.wait(timeout_s)
        assert state == "COMPLETED", f"{state}:\n{self.text}"
        return self.text.splitlines()[-1]

    def ranks(self) -> list[str]:
        """Return the map of ranks of the last start, without the devices."""
        return [re.sub(": CPU.*", "", line) for line in launches(self.run, "ranks")[-1]]

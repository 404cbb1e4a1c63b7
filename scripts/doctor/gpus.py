"""Check this node's GPUs only by nvidia-smi and the kernel's log: for prologs, and for jobs that failed.

    python -m scripts.doctor.gpus
    python -m scripts.doctor.gpus --since-s 600

Success: it prints nothing and exits with status 0. Each fault is a line that begins with `error:`, and the status
is 1; a GPU that only needs watching is a `warning:`, and so is an nvidia-smi that is slow or sees no GPU. It ends
within 10 s, needs neither torch nor other nodes, and writes nothing. slurm/job.sh calls it when a job has failed
(docs/slurm-admin.md).
"""

from __future__ import annotations

import re
import socket
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

from recipes.common.arguments import positive_float
from recipes.common.process.threads import call_within
from scripts.doctor import floors, kernel_log, node
from scripts.doctor.case import Case, Findings
from scripts.doctor.rules import broken_gpus, node_errors
from scripts.launch.command import CommandParser, command, parse

NVIDIA_SMI_S = 7.0
"""nvidia-smi hangs if a GPU's firmware does not answer; without persistence mode it always takes seconds."""

NO_FAULT = re.compile(r"did not end within|no answer within|No devices were found")
"""Complaints about nvidia-smi on healthy nodes: it is slow, or the caller's job has no GPUs."""


class SingleNodeCase(Case):
    """A node without a number, because there are no others."""

    def name(self, rank: int) -> str:
        """Return the name of the host."""
        return str(self.facts[rank]["host"])


def parse_args(argv: Sequence[str]) -> Namespace:
    """Return the options; raises UserError."""
    parser = CommandParser("python -m scripts.doctor.gpus", __doc__)
    back = "how far back the kernel's log counts, at most a day"
    parser.add_argument("--since-s", type=positive_float, default=kernel_log.RECENT_S, metavar="S", help=back)
    return parse(parser, argv)


def examine(since_s: float) -> Case:
    """Collect what nvidia-smi and the kernel's log say about this node."""
    facts: node.Facts = {"host": socket.gethostname(), "errors": {}, "kernel_log": kernel_log.read(since_s)}
    try:
        facts["gpus"] = call_within(lambda: node.gpus(NVIDIA_SMI_S / 2), NVIDIA_SMI_S)
    except (OSError, ValueError) as error:
        facts["errors"]["gpus"] = node.one_line(error)
    return SingleNodeCase(1, facts={0: facts})


def nvidia_smi_errors(case: Case) -> Findings:
    """Report an nvidia-smi that failed; what healthy nodes show, too, is a warning."""
    for finding in node_errors(case):
        yield replace(finding, severity="warning") if NO_FAULT.search(finding.what) else finding


@command
def main(argv: Sequence[str]) -> int:
    """Return the exit status."""
    case = examine(parse_args(argv).since_s)
    findings = [finding for rule in (nvidia_smi_errors, broken_gpus, floors.kernel_log) for finding in rule(case)]
    for finding in findings:
        print(finding, flush=True)
    return int(any(finding.severity == "error" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())

"""What the kernel's log of the last day says of this node's GPUs and memory: Xid events and uncorrected errors.

NVIDIA's driver writes `NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.`; the numbers and the advice
are from NVIDIA's Xid catalog. Events that a bug in a program causes (13, 31, 43, 45) are left out.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from typing import Any

RECENT_S = 24 * 3600

READ_S = 2.0
"""Time limit for reading: a failing driver may write lines faster than they can be read."""

DRAIN = "drain the node and have the board and its links tested"
RESET = "drain the node and reset the GPU (nvidia-smi --gpu-reset), or reboot; if it comes back, replace it"
REBOOT = "drain the node and switch it off and on; if it comes back, replace the GPU"
WATCH = "keep using it; reset the GPU when it is idle to apply the remapping"
XIDS = {
    48: (RESET, "uncorrectable ECC error"),
    62: (RESET, "internal micro-controller halt"),
    63: (WATCH, "a row of its memory is to be remapped"),
    64: (DRAIN, "remapping a row of its memory failed"),
    74: (DRAIN, "NVLink error"),
    79: (REBOOT, "fallen off the bus"),
    92: (WATCH, "many correctable ECC errors"),
    94: (WATCH, "contained ECC error"),
    95: (RESET, "uncontained ECC error"),
    110: (REBOOT, "security fault"),
    119: (RESET, "its GSP firmware does not answer"),
    120: (RESET, "its GSP firmware failed"),
    140: (RESET, "unrecovered ECC error"),
    149: (DRAIN, "fatal NVLink error"),
}
XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)")
MEMORY = re.compile(r"EDAC .*\b[1-9]\d* UE\b|Memory failure: |Hardware Error.*Uncorrected")


def parse(text: str, uptime_s: float, since_s: float = RECENT_S) -> list[dict[str, Any]]:
    """Count the events of the last since_s seconds, at most a day, in /dev/kmsg's records by device and number."""
    found: Counter[tuple[str, int]] = Counter()
    for line in text.splitlines():
        head, _, message = line.partition(";")
        fields = head.split(",")
        if len(fields) < 3 or not fields[2].isdigit() or uptime_s - int(fields[2]) / 1e6 > min(since_s, RECENT_S):
            continue
        if (xid := XID.search(message)) and int(xid[2]) in XIDS:
            found[xid[1], int(xid[2])] += 1
        elif MEMORY.search(message):
            found["memory", 0] += 1
    return [{"device": device, "xid": xid, "count": count} for (device, xid), count in found.items()]


def read(since_s: float = RECENT_S) -> list[dict[str, Any]] | None:
    """Return this node's events, or None if the log cannot be read (kernel.dmesg_restrict, most containers)."""
    try:
        log = os.open(os.environ.get("KMSG", "/dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    records, deadline = [], time.monotonic() + READ_S
    try:
        while time.monotonic() < deadline:
            try:
                record = os.read(log, 8192)
            except BrokenPipeError:
                continue  # lines were overwritten before they were read: the next read continues after them
            if not record:
                break
            records.append(record)
    except BlockingIOError:
        pass  # that was the last record
    except OSError:
        return None
    finally:
        os.close(log)
    return parse(b"".join(records).decode(errors="replace"), time.clock_gettime(time.CLOCK_BOOTTIME), since_s)

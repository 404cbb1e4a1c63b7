"""What a checkpoint costs: the stall of an asynchronous save over a synchronous one, and how fast one is read.

The limits: a save must copy its content in memory, and a restore must read the file into new memory. Touching new
memory for the first time takes about as long as reading the file.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

from scripts.bench.figures import Figure, Rounds, ratio
from scripts.bench.programs import contender

OPTIONS = ("--model", "resnet50", "--optimizer", "adamw", "--data", "synthetic", "--image-size", "8")
SMALL = ("--num-samples", "64", "--global-batch-size", "4", "--lr", "0.0001")


def measure(rounds: int, folder: Path) -> list[Figure]:
    """Save and restore resnet50 with AdamW's state; the two kinds of save take turns, and so do the two reads."""
    found = contender("save", [str(folder), "--saves", str(rounds), "--", *OPTIONS, *SMALL])
    stalls: Rounds = {"async": found["begin_s"], "sync": found["write_s"], "copy": found["copy_s"]}
    reads: Rounds = {name: [found["bytes"] / s for s in found[f"{name}_s"]] for name in ("restore", "read")}
    ms = {name: f"{1000 * median(values):.0f} ms" for name, values in stalls.items()}
    rates = {name: f"{median(values) / 1e6:,.0f} MB/s" for name, values in reads.items()}
    of_bytes, name = f"for {found['bytes'] / 1e6:.0f} MB", "stall of an asynchronous save"
    sync, copy = (f"{ms['async']} against {ms[other]} {of_bytes}" for other in ("sync", "copy"))
    copying = "copying as many bytes in memory"
    read = f"{rates['restore']} against {rates['read']}; checksum and load_state_dict included"
    restore, reading = "speed of a restore, file not in memory", "reading the file into new memory"
    return [
        Figure(name, *ratio(stalls, "async", "sync"), "<= 0.05", "a synchronous save", sync),
        Figure(name, *ratio(stalls, "copy", "async"), "", copying, copy, is_limit=True),
        Figure(restore, *ratio(reads, "restore", "read"), ">= 0.8", reading, read, is_limit=True),
    ]

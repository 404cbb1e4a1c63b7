"""What a checkpoint costs: the stall of an asynchronous save over a synchronous one, and how fast one is read."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from scripts.bench.figures import Figure, Rounds, ratio
from scripts.bench.programs import contender

PART = "checkpoint"
OPTIONS = ("--model", "resnet50", "--optimizer", "adamw", "--data", "synthetic", "--image-size", "8")
SMALL = ("--num-samples", "64", "--global-batch-size", "4", "--lr", "0.0001")


def measure(rounds: int, folder: Path) -> list[Figure]:
    """Save and restore resnet50 with AdamW's state; both kinds of a save and of a read take turns."""
    found = contender("save", [str(folder), "--saves", str(rounds), "--", *OPTIONS, *SMALL])
    size, megabytes = found["bytes"], found["bytes"] / 1e6
    stalls: Rounds = {"async": found["begin_s"], "sync": found["write_s"]}
    speeds: Rounds = {name: [size / s for s in found[f"{name}_s"]] for name in ("restore", "read")}
    milliseconds = {name: f"{1000 * median(values):.0f} ms" for name, values in stalls.items()}
    rates = {name: f"{median(values) / 1e6:,.0f} MB/s" for name, values in speeds.items()}
    saved = f"{milliseconds['async']} against {milliseconds['sync']} for {megabytes:.0f} MB"
    read = f"{rates['restore']} against {rates['read']}; checksum and load_state_dict included"
    stall, speed = ratio(stalls, "async", "sync"), ratio(speeds, "restore", "read")
    name, file = "stall of an asynchronous save", "speed of a restore, file not in memory"
    return [
        Figure(PART, name, *stall, "<= 0.05", "a synchronous save", saved),
        Figure(PART, file, *speed, ">= 0.8", "reading the file", read),
    ]

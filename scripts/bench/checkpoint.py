"""What a checkpoint costs: the stall of an asynchronous save over a synchronous one, and how fast one is read.

The limits: a save must copy its content in memory; a restore must read the file into new memory, and make tensors
of it by torch.load. Touching new memory for the first time takes about as long as reading the file.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

from scripts.bench.figures import Figure, Rounds, ratio
from scripts.bench.programs import contender

OPTIONS = ("--optimizer", "adamw", "--data", "synthetic", "--image-size", "8", "--device", "cpu")
SMALL = ("--num-samples", "64", "--global-batch-size", "4", "--lr", "0.0001")
MODELS = ("resnet50", "wide_resnet101_2")
"""Of 26 and 127 million parameters: 0.3 and 1.5 GB with the state of the optimizer."""


def measure(rounds: int, folder: Path) -> list[Figure]:
    """Save and restore each model with AdamW's state."""
    return [figure for model in MODELS for figure in figures(model, rounds, folder / model)]


def figures(model: str, rounds: int, folder: Path) -> list[Figure]:
    """Return the figures of one model; the two kinds of save take turns, and so do the three reads."""
    words = [str(folder), "--saves", str(rounds), "--", "--model", model, *OPTIONS, *SMALL]
    found = contender("save", words)
    stalls: Rounds = {"async": found["begin_s"], "sync": found["write_s"], "copy": found["copy_s"]}
    reads: Rounds = {
        name: [found["bytes"] / s for s in found[f"{name}_s"]] for name in ("restore", "load", "read")
    }
    ms = {name: f"{1000 * median(values):.0f} ms" for name, values in stalls.items()}
    rates = {name: f"{median(values) / 1e6:,.0f} MB/s" for name, values in reads.items()}
    of_bytes = f"for {found['bytes'] / 1e6:,.0f} MB"
    sync, copy = (f"{ms['async']} against {ms[other]} {of_bytes}" for other in ("sync", "copy"))
    stall, copying = f"stall of an asynchronous save, {model}", "copying as many bytes in memory"
    below = "the next line has it"
    load, read = (
        f"{rates['restore']} against {rates[other]} {of_bytes}; checksum and load_state_dict included"
        for other in ("load", "read")
    )
    restore, reading = f"speed of a restore, {model}, file not in memory", "reading the file into new memory"
    return [
        Figure(f"{stall}: time", *ratio(stalls, "async", "sync"), "", "a synchronous save", sync, no_limit=below),
        Figure(f"{stall}: speed", *ratio(stalls, "copy", "async"), ">= 0.8", copying, copy, is_limit=True),
        Figure(restore, *ratio(reads, "restore", "read"), ">= 0.8", reading, read, is_limit=True),
        Figure(
            f"{restore}, in torch's format",
            *ratio(reads, "restore", "load"),
            ">= 0.8",
            "torch.load alone",
            load,
            is_limit=True,
        ),
    ]

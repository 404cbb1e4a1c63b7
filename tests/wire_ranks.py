"""Two nodes with a network each, whose ranks train with one recipe after another in the same two processes.

    python -m tests.wire_ranks FOLDER

Run it as root; FOLDER/NAME/result.json then has the bytes that node 0 sent per step. All recipes share the
processes and their imports: starting each one by itself would take longer than training.
"""

import importlib
import os
import sys

from scripts.lab import network
from scripts.launch.local import free_port

VARIANTS = {"ddp-fp32": ("ddp",), "ddp-fp16": ("ddp", "--grad-compression", "fp16"), "scratch": ("scratch",)}
WORDS = ("--data", "synthetic", "--image-size", "96", "--num-samples", "1000", "--global-batch-size", "4")
WORDS += ("--max-steps", "41", "--log-every", "1000", "--lr", "0.001", "--device", "cpu", "--no-tensorboard")


def run_rank(folder, ports):
    for (name, (recipe, *words)), port in zip(VARIANTS.items(), ports, strict=True):
        os.environ["MASTER_PORT"] = port
        module = importlib.import_module(f"recipes.{recipe}.train")
        module.main([*WORDS, *words, "--runs-dir", folder, "--name", name])


def main(folder, *ports):
    if ports:
        run_rank(folder, ports)
        return
    network.enter("tests.wire_ranks", [folder])
    net = network.Network(2)
    for node in range(2):  # packets queue up before the link, so the kernel sends large segments: few headers
        net.narrow(node, 1000)
    ports = [str(free_port()) for _ in VARIANTS]
    net.run_ranks([sys.executable, "-m", "tests.wire_ranks", folder, *ports], nodes=2, threads=1, timeout_s=110)


if __name__ == "__main__":
    main(*sys.argv[1:])

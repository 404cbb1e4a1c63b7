"""Memory that a step frees stays with the process: the next step causes no page faults."""

import os
import platform
import subprocess
import sys

import pytest

from tests.support import ROOT

STEPS = """
import resource
import torch
from recipes.common.process.entry import run_main

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    return [torch.ones(5 * 2**20 // 4) for _ in range(8)]

def main():
    for _ in range(3):
        step()
    before = faults()
    for _ in range(10):
        step()
    print((faults() - before) // 10)

run_main(main)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc, whose malloc() is adjusted; use Linux")
@pytest.mark.parametrize(("env", "is_kept"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False)])
def test_a_step_reuses_the_pages_of_the_one_before(env, is_kept):
    """40 MB are 10,240 pages; whoever sets glibc's variables gets what they ask for."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    words = [sys.executable, "-c", STEPS]
    found = subprocess.run(words, cwd=ROOT, env={**bare, **env}, capture_output=True, text=True, check=True)
    assert (int(found.stdout) < 100) is is_kept, found.stdout

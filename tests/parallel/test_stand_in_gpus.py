"""tests/gpu on stand-ins for GPUs: see tests/stand_in_gpus.py."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import ROOT, TIMEOUT_S

pytestmark = pytest.mark.slow
HIDDEN = ("CUDA_VISIBLE_DEVICES", "REQUIRE")
"""The tests begin with GPUs hidden, and stand-ins cannot have all that REQUIRE names."""


@pytest.mark.parametrize("part", ["apex", "context_gpu", "ddp_gpu", "every_recipe_gpu"])
def test_what_needs_no_kernel_passes_without_a_gpu(part, tmp_path):
    env = {name: value for name, value in os.environ.items() if name not in HIDDEN and "PYTEST" not in name}
    own = ("-p", "no:cacheprovider", "--quiet", "-m", "", f"--basetemp={tmp_path / 'own'}")
    outcome = subprocess.run(
        [sys.executable, "-m", "pytest", *own, f"tests/gpu/test_{part}.py"],
        cwd=ROOT,
        env=env | {"STAND_IN_GPUS": "4"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=4 * TIMEOUT_S,
    )
    assert outcome.returncode == 0, outcome.stdout
    assert " passed" in outcome.stdout

"""tests/gpu on stand-ins for GPUs: see tests/light/stand_in_gpus.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import require
from tests.support import Command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.mark.parametrize(
    "part", ["apex", "context_gpu", "ddp_gpu", "devices_gpu", "every_recipe_gpu", "pages_gpu"]
)
def test_what_needs_no_real_gpu_passes(part, tmp_path, monkeypatch):
    is_known = torch.__version__ >= "2.14"
    require("torch-2.14", is_known, f"stand-ins do not fit torch {torch.__version__}", "run `make setup`")
    is_without = not Path("/dev/nvidiactl").exists()  # torch's C++ code would use them
    require("no-gpu", is_without, "this machine has GPUs", "run `make test ARGS=tests/gpu`")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # the tests hide GPUs
    monkeypatch.delenv("PYTEST_XDIST_TESTRUNUID", raising=False)  # whose fork server has none
    own = ("-p", "no:cacheprovider", "--quiet", "-m", "", f"--basetemp={tmp_path / 'own'}")
    words = (sys.executable, "-m", "pytest", *own, f"tests/gpu/test_{part}.py")
    result = Command(*words, STAND_IN_GPUS="4", REQUIRE="gpu,two-gpus").wait(timeout_s=1400)
    assert result.status == 0, result.stdout
    assert " passed" in result.stdout

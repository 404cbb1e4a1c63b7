"""What crosses the wire for a step, as interfaces of nodes with a network each count it: bytes, never times."""

import json
import sys

import pytest

from scripts.bench.wire import ring_bytes
from tests import wire_ranks
from tests.conftest import need_namespaces
from tests.support import run_command

pytestmark = pytest.mark.slow


def test_bytes_of_a_step(tmp_path):
    """LeNet on images of 96 pixels and 1,000 classes has 1,027,436 parameters: 4.1 MB of gradients."""
    need_namespaces()
    done = run_command(sys.executable, "-m", "tests.wire_ranks", str(tmp_path), timeout_s=120)
    assert done.status == 0, done.stdout + done.stderr
    # conv 6 x 3 x 25 + 6, conv 16 x 6 x 25 + 16, linear 16 x 22 x 22 -> 120 -> 84 -> 1,000
    parameters = 456 + 2_416 + (7_744 + 1) * 120 + 121 * 84 + 85 * 1_000
    limit = ring_bytes(2, gradient_bytes=4 * parameters)
    results = {name: json.loads((tmp_path / name / "result.json").read_text()) for name in wire_ranks.VARIANTS}
    sent = {name: result["sent_bytes_per_step"] / limit for name, result in results.items()}
    # The clock stops and starts within a step: a few packets of a run are not counted.
    assert 0.98 < sent["ddp-fp32"] <= 1.01, sent
    assert 0.49 < sent["ddp-fp16"] <= 0.505, sent
    assert 0.98 < sent["scratch"] <= 1.01, sent

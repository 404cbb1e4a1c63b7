"""What crosses the wire for a step, as interfaces of nodes with a network each count it: bytes, never times."""

import json
import sys

import pytest

from recipes.ddp.train import options
from scripts.plan.cost_model import Cluster, Compute, Link, Method, ring_bytes, step
from scripts.plan.workload import count_workload, kind_of
from tests import wire_ranks
from tests.conftest import need_namespaces
from tests.support import run_command

pytestmark = pytest.mark.slow


def planned_bytes(*words):
    """Return the bytes that a node sends per step according to the plan."""
    args = options([*wire_ranks.WORDS, *words])
    gradients = count_workload(args, kind_of(args)).gradients
    method = Method("ddp", device="cpu", grad_compression=args.grad_compression)
    return step(gradients, Compute(1.0, 2.0), Cluster(2, 1, Link(0.0, 1e9)), method).sent_bytes_per_node


def test_bytes_of_a_step(tmp_path):
    """LeNet on images of 96 pixels and 1,000 classes has 1,027,436 parameters: 4.1 MB of gradients."""
    need_namespaces()
    run_command(sys.executable, "-m", "tests.wire_ranks", str(tmp_path), timeout_s=120, check=True)
    # conv 6 x 3 x 25 + 6, conv 16 x 6 x 25 + 16, linear 16 x 22 x 22 -> 120 -> 84 -> 1,000
    parameters = 456 + 2_416 + (7_744 + 1) * 120 + 121 * 84 + 85 * 1_000
    limit = ring_bytes(4 * parameters, 2)
    assert planned_bytes() == 2 * planned_bytes("--grad-compression", "fp16") == limit
    results = {name: json.loads((tmp_path / name / "result.json").read_text()) for name in wire_ranks.VARIANTS}
    sent = {name: result["sent_bytes_per_step"] / limit for name, result in results.items()}
    # Counting starts and stops within a step, and does not include bytes that are still in a socket's buffer. The
    # size of the headers depends on the machine: at most 66 bytes per 1,448, in frames of 1,514.
    framed = 1514 / 1448
    assert 0.98 < sent["ddp-fp32"] <= framed, sent
    assert 0.49 < sent["ddp-fp16"] <= framed / 2, sent
    assert 0.98 < sent["scratch"] <= framed, sent

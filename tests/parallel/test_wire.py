"""What crosses the wire for a step, read from the counters of the nodes' own interfaces: bytes, never times."""

import json
import sys

from scripts import network
from scripts.bench.wire import Work
from tests.conftest import require
from tests.support import run_command


def test_bytes_of_a_step(tmp_path):
    """LeNet on images of 96 pixels and 1,000 classes has 1,029,340 parameters: 4.1 MB of gradients."""
    require("netns", not network.why_not(), network.why_not(), "run `make test` as root")
    result = tmp_path / "wire.json"
    words = ["--model", "lenet", "--image-size", "96", "--few", "2", "--more", "22", "--nodes", "2"]
    only = "ddp-fp32,ddp-fp16,scratch"
    command = [sys.executable, "-m", "scripts.bench.wire", *words, "--only", only, "--result", str(result)]
    done = run_command(*command)
    assert done.status == 0, done.stdout + done.stderr
    # conv 6 x 3 x 25 + 6, conv 16 x 6 x 25 + 16, linear 7,744 -> 120 -> 84 -> 1,000
    parameters = 456 + 2_416 + (7_744 + 1) * 120 + 121 * 84 + 85 * 1_000
    limit = Work(gradient_bytes=4 * parameters).ring_bytes(2)
    sent = {row["variant"]: max(row["sent_bytes"][0]) / limit for row in json.loads(result.read_text())}
    assert 1.0 < sent["ddp-fp32"] <= 1.01
    assert 0.5 < sent["ddp-fp16"] <= 0.505
    assert 1.0 < sent["scratch"] <= 1.01

"""What all tests share: skips that CI can forbid, and an end to every process that a test has started."""

import os

import pytest

from tests import support


@pytest.fixture(autouse=True)
def no_process_is_left():
    """End what a failed or timed-out test leaves behind, so that it disturbs no other."""
    yield
    support.end_all()


def require(name: str, available: object, reason: str, remedy: str) -> None:
    """Skip the test where something is not available, or fail it if REQUIRE=NAME,... says that it has to be."""
    if available:
        return
    message = f"needs {name}: {reason}; {remedy}"
    if name in os.environ.get("REQUIRE", "").replace(" ", "").split(","):
        pytest.fail(f"REQUIRE={name}: {message}", pytrace=False)
    pytest.skip(message)

"""Skips that say what is missing and how to get it; REQUIRE=mpi,gpu,... turns them into failures."""

import os

import pytest


def require(name: str, available: bool, reason: str, remedy: str) -> None:
    """Skip the test unless something is available; fail where REQUIRE names it."""
    if available:
        return
    if name in os.environ.get("REQUIRE", "").split(","):
        pytest.fail(f"{reason} although REQUIRE={name}: {remedy}")
    pytest.skip(f"{reason}: {remedy}")

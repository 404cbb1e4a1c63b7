"""What the tests of several recipes compare with."""

import pytest


@pytest.fixture(scope="module")
def single(request, tmp_path_factory):
    """Return the run of single with the options STEPS of a test's file."""
    from tests.support import train  # here, as the process that distributes the tests needs no torch

    return train("single", tmp_path_factory.mktemp("single"), 1, *request.module.STEPS)

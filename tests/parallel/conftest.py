"""What the tests of several recipes compare with."""

import pytest


@pytest.fixture(scope="module")
def single(request, tmp_path_factory):
    """Return the run of single with the options STEPS of a test's file."""
    from tests.support import train  # here, as the process that distributes the tests needs no torch

    return train("single", tmp_path_factory.mktemp("single"), 1, *request.module.STEPS)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Return the option for a folder of text with 730 training and 66 test windows of 8 bytes."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(12):
        line = f"{number} bottles of beer on the wall, {number} bottles of beer.\n"
        (folder / f"{number}.txt").write_text(9 * line)
    return "--data-dir", str(folder)

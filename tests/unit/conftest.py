"""What tests of this folder share."""

import pytest


@pytest.fixture
def single(tmp_path, capsys):
    """Return a function that runs single in tmp_path / NAME and returns the lines that were printed."""
    from recipes.single.train import main

    def run(name, *argv, runs_dir=tmp_path):
        named = ["--name", name] if name else []
        capsys.readouterr()
        main(["--runs-dir", str(runs_dir), *named, "--log-every", "1", "--no-tensorboard", *argv])
        return capsys.readouterr().out.splitlines()

    return run

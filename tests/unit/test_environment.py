"""An interpreter in which no recipe can run is refused before it starts one."""

import sys

import pytest

from scripts.launch.environment import reason_against
from tests.support import run_command


def test_this_one_will_do():
    assert reason_against(["torch", "psutil"]) == ""


def test_an_older_python_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    said = "recipes need 3.11 or later; name another one"
    assert reason_against(["torch"]) == f"is Python {sys.version.split()[0]}, and {said}"


@pytest.mark.parametrize(("script", "needed"), [("", "torch, isal"), ("train.py", "torch")])
def test_missing_packages_are_named(tmp_path, script, needed):
    """With -S, Python finds no packages but those of PYTHONPATH."""
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    (tmp_path / "python").chmod(0o755)
    for name in ("numpy", "psutil", "tqdm"):
        (tmp_path / f"{name}.py").touch()
    (tmp_path / "torch").mkdir()  # as a checkout of torch, beside which Python was started
    words = {"PYTHON": str(tmp_path / "python"), "PYTHONPATH": str(tmp_path), "SCRIPT": script}
    result = run_command("scripts/launch.sh", "ddp", **words)
    fix = "install what is missing there, or leave PYTHON unset for .venv (make setup)"
    assert result.refusal.endswith(f" has no {needed}; {fix}")


@pytest.mark.parametrize(
    ("version", "is_refused"), [("2.6.0+cu124", True), ("2.10.1", True), ("2.11.0a0+nv26.02", False)]
)
def test_an_older_torch_is_refused(tmp_path, monkeypatch, version, is_refused):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(f"__all__ = []\n__version__ = '{version}'\ndebug = False\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # find_spec() prefers what is imported
    said = f"has torch {version}, and recipes need 2.11 or later; install that there"
    assert reason_against(["torch"]) == (said if is_refused else "")

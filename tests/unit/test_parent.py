"""A process ends with its parent: by the kernel, by polling, and where the parent has ended before it asked."""

import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.support import ROOT, has_ended, wait_until

CHILD = """
import signal, sys, time
from recipes.common.process import parent

if sys.argv[1] == "polling":
    parent._ask_kernel = lambda number: False
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
parent.end_with_launcher()
print("up", flush=True)
parent.exec_python(["-u", "-m", "tests.unit.sleeper", "60"]) if sys.argv[2] == "exec" else time.sleep(60)
"""

LAUNCHER = """
import os, subprocess, sys

env = {**os.environ, "LAUNCHER_PID": str(os.getpid())}
child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], env=env)
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.parametrize("what", ["stay", "exec"])
@pytest.mark.parametrize("how", ["kernel", "polling"])
def test_a_process_ends_with_its_killed_launcher(how, what):
    command = [sys.executable, "-c", LAUNCHER, CHILD, how, what]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as launcher:
        child = psutil.Process(int(launcher.stdout.readline()))
        try:
            assert launcher.stdout.readline() == "up\n"
            if what == "exec":
                assert launcher.stdout.readline() == "sleeps 60 without LAUNCHER_PID\n"
            assert child.is_running()
            launcher.kill()
            wait_until(lambda: has_ended(child), 10, "the end of the child")
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):  # it is gone, and its next parent has reaped it
                child.kill()


@pytest.mark.parametrize("how", ["kernel", "polling"])
def test_a_process_whose_launcher_has_gone_already_ends_at_once(how):
    """Its parent is a process other than the one that LAUNCHER_PID names."""
    env = {**os.environ, "LAUNCHER_PID": str(os.getppid())}
    command = [sys.executable, "-c", CHILD, how, "stay"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_without_a_launcher_a_process_stays():
    """For example, nohup has started it from a shell which then ends."""
    code = "from recipes.common.process import parent; parent.end_with_launcher(); print(parent._is_polling)"
    env = {name: value for name, value in os.environ.items() if name != "LAUNCHER_PID"}
    command = ["sh", "-c", f"{sys.executable} -c 'import time; time.sleep(0.5); {code}' &"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=50)
    assert done.stdout == "False\n", done.stderr

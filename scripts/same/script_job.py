"""Start the ranks of a script from a fork server that has torch loaded, or by a launcher, and wait for them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path

from recipes.common.errors import UserError
from recipes.common.process.parent import end_with_parent
from recipes.common.process.signals import block_signals
from recipes.common.process.sockets import choose_socket_folder
from scripts.launch.command import ROOT, warn
from scripts.launch.local import free_port, node_environment, visible_gpus
from scripts.launch.processes import end_sessions

FAILURE_GRACE_S = 10.0
"""How long the other ranks may continue after one has failed: their output may say why."""

CONTEXT = multiprocessing.get_context("forkserver")


def choose_gpus(count: int) -> None:
    """Choose the GPUs of all runs: this machine's or, if there are some, but fewer than `count`, none; say so.

    One process on a GPU and several on CPUs would differ by more than rounding.
    """
    gpus = visible_gpus()
    if 0 < len(gpus) < count:
        what = f"up to {count} processes and {len(gpus)} GPU{'s' * (len(gpus) > 1)}: all runs use CPUs"
        warn(what + (f"; WORLD_SIZES up to {len(gpus)} use GPUs" if len(gpus) > 1 else ""))
        gpus = []
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)  # so that runs do not ask nvidia-smi again


def run(
    words: Sequence[str], launcher: str, world_size: int, folder: Path, timeout_s: float, **variables: str
) -> list[int | None]:
    """Run a script to its end; return each rank's exit status, negative for a signal, None if it hung.

    `launcher` is the command before `-m scripts.same.observe`, and the only status is then its own; "": a fork
    server. The ranks record in the folder, which is created; `variables` are the observer's.
    """
    folder.mkdir(parents=True)
    env = node_environment(0, 1, world_size, visible_gpus(), free_port()) | variables
    env |= {"SAME_FOLDER": str(folder), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    if launcher:
        # In WORKDIR, relative paths such as .venv/bin/python would lead elsewhere.
        parts = [(word, Path(word)) for word in shlex.split(launcher)]
        own = [str(path.absolute()) if os.sep in word and path.is_file() else word for word, path in parts]
        command = [*own, "-m", "scripts.same.observe", *words]
        return [run_launcher(command, env, folder, timeout_s)]
    choose_socket_folder()
    with block_signals(signal.SIGINT):  # the server ignores Ctrl-C only once it has imported torch
        forkserver.ensure_running()
    processes = [CONTEXT.Process(target=run_rank, args=(words, env, rank)) for rank in range(world_size)]
    try:
        with interrupt_later():  # else Ctrl-C would leave a process whose pid is not known yet
            for process in processes:
                process.start()
        return wait(processes, timeout_s)
    finally:
        for process in processes:
            if process.pid:  # it has been started, and runs on after Ctrl-C
                process.kill()


@contextlib.contextmanager
def interrupt_later() -> Iterator[None]:
    """Raise the KeyboardInterrupt of a Ctrl-C at the end of this block; a mask would not hold in other threads."""
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received:
            raise KeyboardInterrupt


def run_rank(words: Sequence[str], env: Mapping[str, str], rank: int) -> None:
    """Act as a rank: set its variables, and run the script."""
    end_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    multiprocessing.set_start_method(None, force=True)  # the script may choose one for its workers
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(os.environ.pop("WORKDIR", "") or ".")
    import torch

    from scripts.same.observe import run_script

    torch.set_num_threads(int(env["OMP_NUM_THREADS"].split(",")[0]))  # OpenMP's list has a number per level
    run_script(words[0], list(words[1:]))


def wait(processes: Sequence[multiprocessing.process.BaseProcess], timeout_s: float) -> list[int | None]:
    """Wait for all ranks; kill those that exceed timeout_s (None) or outlive a failed one by FAILURE_GRACE_S."""
    deadline = time.monotonic() + timeout_s
    has_failed = False
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if not has_failed and any(process.exitcode for process in processes):
            has_failed, deadline = True, min(deadline, time.monotonic() + FAILURE_GRACE_S)
        time.sleep(0.02)
    statuses = []
    for process in processes:
        is_hung = process.is_alive() and not has_failed
        process.kill()
        process.join()
        statuses.append(None if is_hung else process.exitcode)
    return statuses


def run_launcher(command: Sequence[str], env: Mapping[str, str], folder: Path, timeout_s: float) -> int | None:
    """Run a launcher to its end; return its exit status, or None if it hung."""
    paths = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    unset = ("RANK", "LOCAL_RANK")  # the launcher's task
    with open(folder / "launcher.err", "wb") as err:
        try:
            process = subprocess.Popen(
                command,
                cwd=env.get("WORKDIR") or None,
                env={name: value for name, value in env.items() if name not in unset} | {"PYTHONPATH": paths},
                stdout=subprocess.DEVNULL,
                stderr=err,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        except OSError as error:
            raise UserError(f"LAUNCH: cannot start {command[0]}: {error.strerror}") from None
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                # horovodrun starts each rank in a session of its own, where it would live on for a minute.
                end_sessions([process.pid])
                process.wait()

"""Who is named when ranks wait for one another, from what each of them says."""

import builtins
import contextlib
import errno
import json
import os
import random
import re
import signal
import socket
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from recipes.common.errors import UserError
from recipes.common.folders import replace_text
from recipes.common.parallel import sharding
from recipes.common.process import entry
from recipes.common.process.entry import run_main
from recipes.common.process.ranks import Ranks
from recipes.common.process.signals import STOP_SIGNALS
from recipes.common.watch import report
from recipes.common.watch import watch as watch_module
from recipes.common.watch.notes import Notes, read_notes
from recipes.common.watch.report import COLLECT_S, GATHER_S, MOST_NAMED, Report, describe_rank, summarize
from recipes.common.watch.timeouts import HANG_STATUS, time_limit, wait_timeout
from recipes.common.watch.watch import NOTE_INTERVAL_S, Watch, median_without, stragglers
from recipes.common.world import devices, world
from scripts.launch.local import free_port
from tests.support import is_equal, wait_until
from tests.tiny import tiny_job


@pytest.fixture
def args(tmp_path):
    return SimpleNamespace(timeout_s=5.0, runs_dir=tmp_path, straggler_window_s=10.0, straggler_share=0.0)


@pytest.fixture
def watch(args):
    """The watch of a job of one rank, without a store."""
    with contextlib.closing(Watch(0, 1, args, None)) as watch:
        yield watch


def note(rank, entered, name, is_inside=True, step=3, since_s=5.0, time_s=60.0):
    own = {"rank": rank, "host": f"node-{rank}", "pid": 10 + rank, "time_s": time_s, "since_s": since_s}
    return {**own, "entered": entered, "name": name, "is_inside": is_inside, "step": step}


def by_rank(*notes):
    return {one["rank"]: one for one in notes}


def test_silent_ranks_are_named_with_their_last_words():
    found = by_rank(note(0, 9, "gradients"), note(2, 9, "gradients", since_s=4.0))
    text = summarize(found, by_rank(note(1, 8, "metrics", False, 2, time_s=53.0)), 3)
    silent = 'rank 1 on node-1 does not answer, last seen 7.0 s ago past "metrics" after step 2'
    assert text == f'{silent}; ranks 0, 2 waited 5 s in "gradients" after step 3'
    text = summarize(by_rank(note(1, 9, "gradients")), {}, 3)
    assert text.startswith("ranks 0, 2 do not answer, nobody knows where it was; rank 1 waited 5 s in ")


def test_how_long_a_rank_is_silent_does_not_depend_on_the_clocks_of_hosts(watch, monkeypatch):
    before = watch._note()
    monkeypatch.setattr(time, "time", lambda: 0.0)  # of a host whose clock is decades behind
    watch._begun -= 7  # seconds later
    assert report.last_place(before, {1: watch._note()}).startswith("last seen 7.0 s ago ")


def test_the_collective_that_was_not_joined_comes_first():
    """A pipeline's other ranks may have got further, and wait for ranks that wait themselves."""
    found = by_rank(note(0, 11, "labels", step=4), note(1, 10, "metrics"), note(3, 11, "labels", step=4))
    waits = 'rank 1 waited 5 s in "metrics" after step 3, ranks 0, 3 waited 5 s in "labels" after step 4'
    assert summarize(found, {}, 4).endswith(f"; {waits}")


def test_a_rank_outside_of_any_collective_is_named():
    text = summarize(by_rank(note(0, 9, "gradients"), note(1, 8, "stop vote", False)), {}, 2)
    late = 'rank 1 does not come, rank 1 (pid 11 on node-1) is past "stop vote" after step 3 for 5.0 s; '
    assert text == f'{late}rank 0 waited 5 s in "gradients" after step 3'


def test_a_lost_link_blames_nobody():
    text = summarize(by_rank(note(0, 9, "gradients"), note(1, 9, "gradients")), {}, 2)
    waits = 'ranks 0, 1 waited 5 s in "gradients" after step 3'
    assert text == f"all ranks answer, and all wait: {waits}; is a link between them down?"


def test_collectives_of_one_name_in_a_row_count_once(watch):
    for name in ("evaluation", "evaluation", "agreement", "evaluation"):
        with watch(name):
            pass
    assert watch._note()["entered"] == 3
    with pytest.raises(RuntimeError), watch("gradients"):
        raise RuntimeError
    assert watch._note()["name"] == "gradients"
    assert watch._note()["is_inside"], "a rank stands where a collective has failed"


def test_after_a_collective_inside_of_another_the_outer_one_is_watched(args, watch):
    with watch("sample", computes=True, timeouts=3):
        with watch("agreement"):
            pass
        at = watch._at
        assert (at.name, at.is_inside, at.limit_s, at.entered) == ("sample", True, 4 * args.timeout_s + 1, 2)
    assert not watch._at.is_inside


def test_a_dead_peer_is_told_from_one_that_hangs(watch):
    with watch("gradients"):
        assert watch.is_hang("Timed out waiting 5000ms for recv operation to complete")
        assert watch.is_hang("Application timeout caused pair closure")
        assert watch.is_hang("[Rank 1] Work WorkNCCL(SeqNum=7, OpType=BROADCAST) timed out in blocking wait.")
        assert watch.is_hang("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, ")
        assert not watch.is_hang("Connection closed by peer")
        watch._at = watch._at._replace(since=time.monotonic() - 4.5)
        assert watch.is_hang("Connection closed by peer"), "the first whose time is up breaks the connections"
        watch._at = watch._at._replace(since=time.monotonic())
        watch.notes.store = Store()
        assert not watch.is_hang("Connection closed by peer")
        watch.notes.put("hung", "1")
        assert watch.is_hang("Connection closed by peer"), "another rank has noticed it"


NCCL = "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:77, "
REMOTE = f"""{NCCL}remote process exited or there was a network error, NCCL version 2.27.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
socketProgressOpt: Call to recv from 10.0.0.2<33759> failed : Connection reset by peer
Exception raised from checkForNCCLErrorsInternal at ../ProcessGroupNCCL.cpp:2363 (most recent call first):"""
SYSTEM = f"""{NCCL}unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Error while creating shared memory segment /dev/shm/nccl-x (size 9637888): No space left on device"""
INTERNAL = f"""{NCCL}internal error - please report this issue to the NCCL developers, NCCL version 2.27.5
ncclInternalError: Internal check failed.
Last error:
Net : Connection closed by remote peer n2<50260>"""

HOROVOD = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce."
)


MEMORY = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.11 GiB of which 9.88 MiB "
    "is free. Including non-PyTorch memory, this process has 79.09 GiB memory in use. Of the allocated memory 77"
)


@pytest.mark.parametrize(
    ("message", "kind", "reason"),
    [
        ("[../gloo/pair.cc:544] Connection closed by peer [10.0.0.2]:41230. No.", "lost another rank: C", "41230"),
        (REMOTE, "lost another rank: NCCL error in: ", "from 10.0.0.2<33759> failed : Connection reset by peer"),
        (INTERNAL, "lost another rank: NCCL error in: ", "Net : Connection closed by remote peer n2<50260>"),
        (SYSTEM, "cannot exchange data: NCCL error in: ", "(size 9637888): No space left on device"),
        ("NCCL communicator was aborted on rank 1.", "lost another rank: NCCL comm", "aborted on rank 1."),
        (f"{HOROVOD} If the shutdown was caused by", "lost another rank: Horovod ", "has been shut down"),
    ],
    ids=["gloo", "remote", "internal", "system", "aborted", "horovod"],
)
def test_what_a_failed_collective_says_is_one_line(message, kind, reason, monkeypatch, capsys):
    monkeypatch.setattr(os, "_exit", sys.exit)

    wrapped = RuntimeError("the step failed")
    wrapped.__cause__ = RuntimeError(message)
    for error in (wrapped.__cause__, wrapped):
        for status in (1, 69):  # 69: from a launcher that then blames the rank that was lost
            with pytest.raises(SystemExit) as caught:
                run_main(Mock(side_effect=error))
            assert caught.value.code == (status if kind.startswith("lost") else 1)
            monkeypatch.setenv("LOST_RANK_STATUS", "69")
        monkeypatch.delenv("LOST_RANK_STATUS")
        [line, _] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: rank 0 on {socket.gethostname()} {kind}")
        assert line.endswith(reason)


@pytest.mark.parametrize(
    ("rank", "local_rank", "on_every_node", "have_met", "slept_s", "is_printed"),
    [
        ("0", "0", False, True, [], True),
        ("3", "0", True, True, [], True),
        ("3", "0", False, False, [3.0], True),
        ("3", "0", False, True, [3.0], False),
        ("3", "1", False, False, [6.0], False),
        ("3", None, False, False, [3.0], False),
    ],
)
def test_which_rank_prints_a_refusal(
    monkeypatch, capsys, rank, local_rank, on_every_node, have_met, slept_s, is_printed
):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    slept = []
    monkeypatch.setattr(entry, "time", SimpleNamespace(sleep=slept.append))
    monkeypatch.setattr(entry, "HAVE_MET", SimpleNamespace(is_set=lambda: have_met))
    assert run_main(Mock(side_effect=UserError("wrong", on_every_node=on_every_node))) == 2
    assert (slept, capsys.readouterr().err) == (slept_s, "error: wrong\n" * is_printed)


def test_a_signal_ends_the_wait_for_rank_0(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    stop = lambda seconds: signal.raise_signal(signal.SIGTERM)  # noqa: E731
    monkeypatch.setattr(entry, "time", SimpleNamespace(sleep=stop))
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    with pytest.raises(SystemExit) as caught:
        run_main(Mock(side_effect=UserError("wrong")))
    assert caught.value.code == 2


def test_of_ranks_with_the_same_error_one_prints_it(args, monkeypatch, capsys):
    store, slept = Store(), []
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(entry, "time", SimpleNamespace(sleep=slept.append))
    error = UserError("wrong", on_one_rank=True)
    error.status = 7
    for rank in (1, 0):
        watch = Watch(rank, 2, args, store)
        with pytest.raises(SystemExit) as caught:
            run_main(Mock(side_effect=error))
        assert caught.value.code == 7
        assert watch._closed.is_set()
    assert capsys.readouterr().err == "error: wrong\n"
    assert slept == [entry.SAME_ERROR_S] * 2


def test_of_ranks_with_the_same_error_one_of_node_0_prints_it(args, monkeypatch, capsys):
    """Launchers show its lines, and may drop those of other nodes."""
    store, printed = Store(), []
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(entry, "SAME_ERROR_S", 0.0)
    for rank in (3, 2, 1, 0):  # two on each node
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank % 2))
        Watch(rank, 4, args, store)
        with pytest.raises(SystemExit) as caught:
            run_main(Mock(side_effect=UserError("wrong", on_one_rank=True)))
        assert caught.value.code == 2
        if capsys.readouterr().err == "error: wrong\n":
            printed.append(rank)
    assert printed == [3, 1]


def test_a_gpu_without_memory_is_one_line_once_the_checkpoint_is_written(watch, monkeypatch, capsys):
    watch._at = watch._at._replace(since=time.monotonic() - 60)  # a long step is no hang
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(entry, "CHECKPOINT_GRACE_S", 0.0)
    written = []

    def fail():
        threading.Thread(target=lambda: written.append(time.sleep(0.5)), name=entry.CHECKPOINT_THREAD).start()
        raise torch.OutOfMemoryError(MEMORY)

    with pytest.raises(SystemExit) as caught:
        run_main(fail)
    assert (caught.value.code, written) == (1, [None])
    [line] = capsys.readouterr().err.splitlines()
    what = "has no GPU memory left (Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.11 GiB of which"
    fix = "use a smaller --global-batch-size, more --accumulate-steps or processes, or --amp bf16"
    assert line == f"error: rank 0 on {socket.gethostname()} {what} 9.88 MiB is free); {fix}"


def test_a_lack_of_main_memory_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as caught:
        run_main(lambda: torch.empty(2**57, dtype=torch.uint8))
    assert caught.value.code == 1
    [line] = capsys.readouterr().err.splitlines()
    what = f"has no main memory left (you tried to allocate {2**57} bytes); use smaller data, a smaller model"
    assert line == f"error: rank 0 on {socket.gethostname()} {what} or --global-batch-size"


def test_an_error_after_a_lack_of_memory_keeps_its_traceback():
    def fail():
        try:
            raise torch.OutOfMemoryError(MEMORY)
        except RuntimeError:
            raise RuntimeError("the smaller batch failed, too") from None

    with pytest.raises(RuntimeError, match="the smaller batch"):
        run_main(fail)


def test_other_errors_of_the_run_time_keep_their_traceback():
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run_main(Mock(side_effect=RuntimeError("CUDA error: an illegal memory access was encountered")))
    assert {signal.getsignal(number) for number in STOP_SIGNALS} == {signal.SIG_IGN}, "none may kill it at its end"


class Recorder(Watch):
    """A watch that records when it would end the process."""

    def __init__(self, *args):
        self.ends = []
        super().__init__(*args)

    def end(self, error=None):
        self.ends.append(time.monotonic())


@pytest.mark.parametrize(("has_store", "computes", "limit_s"), [(True, False, 1.5), (False, True, 2.0)])
def test_a_wait_that_is_too_long_ends_the_rank(args, has_store, computes, limit_s):
    """It takes a second longer than the backend's own limit, or twice the limit if the rank also computes."""
    args.timeout_s = 0.5
    with contextlib.closing(Recorder(0, 1, args, Store() if has_store else None)) as watch:
        began_at = time.monotonic()
        with watch("gradients", computes=computes):
            wait_until(lambda: watch.ends, 20, "the end of a rank that waits")
        assert watch.ends[0] - began_at > limit_s


def test_a_large_model_may_take_longer_to_gather_than_the_limit_of_a_wait(args, monkeypatch):
    """Each tensor has the whole limit: a slow network is no hang."""
    args.timeout_s = 0.5
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(4)))
    gathered = Mock(side_effect=lambda tensor: (time.sleep(0.3), tensor)[1])
    monkeypatch.setattr(sharding, "gather_whole", gathered)
    with contextlib.closing(Recorder(0, 1, args, Store())) as watch:
        peers = SimpleNamespace(rank=0, watch=watch)
        optimizer = torch.optim.SGD(model.parameters())
        job = SimpleNamespace(args=SimpleNamespace(optimizer="sgd"), model=model, optimizer=optimizer, peers=peers)
        state = sharding.gather_state(job)
        assert (watch.ends, gathered.call_count, watch._at.name) == ([], 8, "checkpoint")
    assert is_equal(state["model"], model.state_dict())


def test_a_rank_that_computes_outside_of_collectives_is_left_alone(args):
    args.timeout_s = 0.5
    with contextlib.closing(Recorder(0, 1, args, Store())) as watch:
        with watch("gradients"):
            pass
        watch._at = watch._at._replace(since=time.monotonic() - 60)
        time.sleep(3 * NOTE_INTERVAL_S)
        assert watch.ends == []


def test_a_rank_without_a_store_ends_with_the_others_that_share_its_folder(args, tmp_path):
    watch = Recorder(0, 2, args, None)
    try:
        watch.follow(lambda: 3, tmp_path)
        (tmp_path / "hang").mkdir()
        wait_until(lambda: watch.ends, 20, "the end")
    finally:
        watch.close()


@pytest.mark.parametrize(("now", "is_other"), [("same", False), ("replaced", True), ("gone", False)])
def test_a_rank_whose_run_was_taken_over_ends_no_rank_of_the_newer_job(args, tmp_path, monkeypatch, now, is_other):
    """The newer job's ranks have no store either, and end if they find hang/. What cannot be read proves none."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    run, config = tmp_path / "mine", tmp_path / "mine" / "config.json"
    run.mkdir()
    replace_text(config, "this launch")
    with contextlib.closing(Watch(0, 1, args, None)) as watch:
        watch.follow(lambda: 3, run)
        if now == "replaced":
            replace_text(config, "next launch")
        elif now == "gone":
            config.unlink()
        with pytest.raises(SystemExit):
            watch.end()
    assert (run / "hang").exists() == (run / "hang-report.txt").exists() == (not is_other)
    assert len(list(tmp_path.glob("hang-*/hang-report.txt"))) == is_other


def test_a_rank_ends_with_the_others_that_share_its_store(args):
    with contextlib.closing(Recorder(0, 2, args, Store())) as watch:
        watch.notes.put("hung", "1")
        wait_until(lambda: watch.ends, 20, "the end")


def test_a_store_that_has_ended_is_no_error(args, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", Mock())
    store = SimpleNamespace(set=Mock(side_effect=RuntimeError("Connection was likely closed")))
    with contextlib.closing(Watch(0, 1, args, store)) as watch:
        watch._threads[1].join(20)
        assert not watch._threads[1].is_alive()
    assert not threading.excepthook.called


def test_a_store_that_does_not_answer_is_asked_once():
    late = Notes(Store(), 120_000).ask(lambda store: (time.sleep(0.5), "late")[1], "nothing", bound_s=0.05)
    assert late == "late", "a store of many ranks has a minute more"
    notes, go = Notes(Store(), 1), threading.Event()
    assert notes.ask(lambda store: go.wait(60), "nothing", bound_s=0.05) == "nothing"
    assert notes.ask(lambda store: "an answer", "nothing") == "nothing"
    go.set()


def test_a_warning_about_a_slow_rank_is_given_once(args):
    watch = Watch(0, 2, args, None)
    watch._stragglers.append("rank 1 is slow")
    assert [watch.take_stragglers() for _ in range(2)] == [["rank 1 is slow"], []]
    watch.close()
    assert Watch.active is None, "a store that has ended is not asked about an error"


@pytest.fixture
def two_watches(args):
    """Ranks 0 and 1 with a store, as connected_world() makes them."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    bound = timedelta(seconds=30)
    how = {"is_master": False, "wait_for_workers": False, "timeout": bound}
    stores = [TCPStore("127.0.0.1", server.port, **how) for _ in range(2)]
    watches = [Watch(rank, 2, args, PrefixStore("watch", store)) for rank, store in enumerate(stores)]
    yield watches
    watches[1].leave()  # what rank 0 still waits for


def test_rank_0_with_which_the_store_goes_leaves_last(two_watches):
    wait_until(lambda: two_watches[1]._last_notes.get(0), 20, "rank 0's note, which goes with the store, too")
    first = threading.Thread(target=two_watches[0].leave, daemon=True)
    first.start()
    first.join(0.5)
    assert first.is_alive(), "rank 1 still asks the store"
    two_watches[1].leave()
    assert not [thread for thread in two_watches[1]._threads if thread.is_alive()]
    first.join(20)
    assert not first.is_alive()


def test_a_rank_that_never_leaves_delays_rank_0_to_a_bound(two_watches, monkeypatch):
    monkeypatch.setattr(watch_module, "LEAVE_TIMEOUT_S", 0.2)
    began_at = time.monotonic()
    two_watches[0].leave()
    assert 0.2 <= time.monotonic() - began_at < 4


def test_entering_a_collective_costs_microseconds(watch):
    began_s = time.thread_time()  # CPU time, which a busy machine does not increase
    for _ in range(10_000):
        with watch("gradients"):
            pass
    assert time.thread_time() - began_s < 10_000 * 50e-6


def test_a_report_reads_no_module_from_a_disk(watch, args, monkeypatch):
    """The disk may be what hangs, and its code may have changed since the job began."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    own_import = builtins.__import__

    def refuse(name, *others):
        if name.startswith("recipes"):
            raise ImportError(name)
        return own_import(name, *others)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", refuse)
        with pytest.raises(SystemExit) as caught:
            watch.end()
    assert caught.value.code == HANG_STATUS
    assert len(list(args.runs_dir.glob("hang-*/hang-report.txt"))) == 1


def test_what_ends_in_time_is_not_given_up_and_leaves_no_thread():
    before, give_up, interval_s = set(threading.enumerate()), Mock(), sys.getswitchinterval()
    sys.setswitchinterval(60.0)  # another thread runs only while this one waits
    try:
        with time_limit(60.0, give_up):
            [timer] = set(threading.enumerate()) - before
        assert not timer.is_alive(), "it may free a process group after Python has ended, which aborts the process"
    finally:
        sys.setswitchinterval(interval_s)
    assert not give_up.called


def test_the_timeout_of_waits_turns_the_flight_recorder_on(args, monkeypatch):
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    assert wait_timeout(args).total_seconds() == 5.0
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0", "the user's word counts"


@pytest.mark.parametrize(("kind", "bound_s"), [("cpu", 5.0), ("cuda", 70.0)])
def test_the_watch_reports_before_nccl_aborts(args, monkeypatch, kind, bound_s):
    """The longest watched wait is twice the time-out plus a second; then the report is collected."""
    made = {}
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    monkeypatch.setattr(world, "choose_device", lambda *unused: device)
    monkeypatch.setattr(devices, "start_gpu", lambda device: None)
    init = lambda backend, timeout, **unused: made.update(own=timeout)  # noqa: E731
    monkeypatch.setattr(world.dist, "init_process_group", init)
    monkeypatch.setattr(world.dist, "new_group", lambda backend, timeout: made.update({backend: timeout}))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    world.connect("auto", Ranks(0, 0, 1, 1), wait_timeout(args))
    assert made["gloo"].total_seconds() == 5.0
    assert made["own"].total_seconds() == bound_s
    assert kind == "cpu" or bound_s > 2 * 5.0 + 1 + GATHER_S + COLLECT_S


def work(steps, busy_s):
    """Return the notes of ranks that have done `steps` steps, and have worked `busy_s` seconds by themselves."""
    return {rank: {"step": steps, "busy_s": own_s, "host": f"n{rank}"} for rank, own_s in enumerate(busy_s)}


def test_a_rank_whose_own_work_takes_longer_is_named():
    """Of 10 s for 100 steps, rank 2 works 5 s by itself and the others 1 s: 40 ms of a step of 100 ms."""
    before, after = work(100, [3, 3, 3, 3]), work(200, [4, 4.1, 8, 3.9])
    text = "rank 2 on n2 is slow: of a step of 100 ms, its own work takes 50 ms, the work of the others 10 ms"
    assert stragglers(before, after, 10, share=0.25) == [text]
    assert stragglers(before, after, 10, share=0.39) == [text]
    assert stragglers(before, after, 10, share=0.41) == []


def test_work_takes_no_longer_than_its_step():
    """A note of before the window and one of its very end are of more time than the window has."""
    before, after = work(100, [0, 0, 0]), work(200, [1, 1, 10.2])
    text = "rank 2 on n2 is slow: of a step of 100 ms, its own work takes 100 ms, the work of the others 10 ms"
    assert stragglers(before, after, 10, share=0.25) == [text]


def test_a_rank_is_compared_with_the_median_of_the_others():
    draw = random.Random(0)
    for size in (2, 3, 4, 5, 8):
        values = sorted(draw.choice([1.0, 2.0, 2.5, draw.random()]) for _ in range(size))
        for place in range(size):
            others = statistics.median(values[:place] + values[place + 1 :])
            assert median_without(values, place) == others


def test_many_slow_ranks_are_a_few_lines():
    """Each line of 4,096 would come again in each window; and each rank's median once took the sum of all."""
    before, after = work(100, [0.0] * 8192), work(200, [1.0 + 7 * (rank % 3 == 0) for rank in range(8192)])
    lines = stragglers(before, after, 10, share=0.25)
    assert len(lines) == MOST_NAMED + 1
    assert lines[0].startswith("rank 0 on n0 is slow: of a step of 100 ms, its own work takes 80 ms")
    assert lines[-1] == f"{2731 - MOST_NAMED} more ranks are that slow, the last one rank 8190 on n8190"


def test_who_is_no_straggler():
    before = work(100, [0, 0])
    assert stragglers(before, work(200, [1, 1.4]), 2, share=0.1) == []  # 4 ms are not worth a line
    assert stragglers(before, work(104, [1, 3]), 10, share=0.1) == []  # too few steps to tell
    assert stragglers({}, work(200, [1, 9]), 10, share=0.1) == []  # the first window has no beginning
    assert stragglers(work(1, [0]), work(200, [9]), 10, share=0.1) == []  # it is alone


def test_ranks_that_stay_slow_are_named_less_and_less_often(args, monkeypatch):
    windows_s = []

    def find(before, after, seconds, share):
        windows_s.append(seconds)
        return ["rank 1 is slow"] * (len(windows_s) != 7)

    monkeypatch.setattr(watch_module, "NOTE_INTERVAL_S", 0.01)
    monkeypatch.setattr(watch_module, "stragglers", find)
    args.straggler_window_s, args.straggler_share = 0.02, 0.25
    with contextlib.closing(Watch(0, 2, args, Store())) as watch:
        wait_until(lambda: len(windows_s) >= 8, 60, "eight windows")
        assert watch.take_stragglers()[:6] == ["rank 1 is slow"] * 6
    assert all(found_s > 0.02 * 2**i for i, found_s in enumerate(windows_s[:7]))
    assert windows_s[7] < 1.28, "once none was slow, the window is the usual one"
    args.straggler_window_s = 1e-5
    with contextlib.closing(Watch(0, 2, args, Store())):
        wait_until(lambda: len(windows_s) > 40, 60, "windows of at most 360 times the first")
    args.straggler_share, store, number = 0.0, Store(), len(windows_s)
    with contextlib.closing(Watch(0, 2, args, store)):
        wait_until(lambda: store.requests > 10, 60, "some notes")
    assert len(windows_s) == number, "0 looks for none"


def test_work_is_what_lies_outside_of_collectives(watch, monkeypatch):
    now = [watch._at.since]
    monkeypatch.setattr(watch_module, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    now[0] += 60
    watch.restart_clock()
    for name in ("gradients", "metrics"):
        now[0] += 1
        with watch(name):
            now[0] += 2
            with watch("inner"):
                pass
    assert watch._note()["busy_s"] == 2.0


class Observed:
    """A stand-in for what reads from a GPU, which records in which collective the rank is meanwhile."""

    def __init__(self, watch, seen):
        self.watch, self.seen = watch, seen

    def __call__(self, *unused):
        note = self.watch._note()
        self.seen.append((note["name"], note["is_inside"]))
        return True


def test_what_reads_from_a_gpu_is_watched(watch):
    """NCCL's calls return at once: a missing rank shows only when the host reads a result."""
    seen, job = [], tiny_job("--log-every", "2", "--checkpoint-every", "3", "--epochs", "9")
    job.peers.watch = watch
    observed = Observed(watch, seen)
    job.guard.check_gradients = job.guard.read_back = job.throughput._synchronize = observed
    assert job.check_gradients(torch.ones(()), [torch.ones(1)])
    job.count_step()  # the first waits for the device
    job.count_step()  # the second is logged
    job.count_step()  # the third is saved
    job.pause()
    assert seen == [("gradients", True)] * 5
    assert not watch._note()["is_inside"]


class FakeEvent:
    """A stand-in for an event of a GPU, which records what the host asks of it and what is watched meanwhile."""

    seen: ClassVar[list] = []
    watch = None

    def __init__(self, **how):
        self.name = f"event {len(FakeEvent.seen)}"
        FakeEvent.seen.append(("made", how))

    def record(self, stream):
        FakeEvent.seen.append(("record", self.name))

    def synchronize(self):
        note = FakeEvent.watch._note()
        FakeEvent.seen.append(("wait", self.name, note["name"], note["is_inside"]))


def test_the_rank_that_reports_stays_until_the_others_have_read_it(watch, monkeypatch):
    """The store may end with it."""
    slept, watch.notes.store = [], Store()
    monkeypatch.setattr(
        report, "time", SimpleNamespace(monotonic=time.monotonic, time=time.time, sleep=slept.append)
    )
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit):
        watch.end()
    assert watch.notes.store.values["done"] == b"0"
    assert slept == [2 * NOTE_INTERVAL_S]


def test_the_host_queues_a_pass_ahead_of_its_gpu_and_no_more(args, monkeypatch):
    """Otherwise the steps that it queues while an exchange hangs would hide that from the watch."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    monkeypatch.setattr(FakeEvent, "seen", [])
    watch = FakeEvent.watch = Watch(0, 2, args, None)
    try:
        job = tiny_job()
        job.peers.world_size, job.peers.watch = 2, watch
        job.end_pass()
        with job.watch_gpu():
            assert not watch._note()["is_inside"], "on a CPU, a step of the optimizer is work"
        assert FakeEvent.seen == [], "a CPU queues nothing"
        job.device = torch.device("cuda", 0)
        for _ in range(3):
            job.end_pass()
        with job.watch_gpu():
            assert watch._note()["name"] == "gradients"
            assert watch._at.limit_s == args.timeout_s + 1
        assert not watch._note()["is_inside"]
        job.peers.world_size = 1
        job.end_pass()  # one process exchanges nothing
    finally:
        watch.close()
    made, used = FakeEvent.seen[:2], FakeEvent.seen[2:]
    assert made == [("made", {"blocking": True})] * 2
    one, two = "event 1", "event 0"
    assert used == [
        *(("record", one), ("wait", two, "gradients", True)),
        *(("record", two), ("wait", one, "gradients", True)),
        *(("record", one), ("wait", two, "gradients", True)),
    ]


# ---- a thousand ranks


class Store:
    """The store of the ranks, which counts their requests."""

    def __init__(self):
        self.values, self.requests = {}, 0

    def set(self, key, value):
        self.requests += 1
        self.values[key] = value.encode()

    def get(self, key):
        self.requests += 1
        return self.values[key]

    def multi_get(self, keys):
        self.requests += 1
        return [self.values[key] for key in keys]

    def check(self, keys):
        self.requests += 1
        return all(key in self.values for key in keys)

    def add(self, key, amount):
        self.requests += 1
        self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
        return int(self.values[key])


def test_many_ranks_are_named_by_ranges_and_many_silent_ones_are_a_short_line():
    """A switch that fails takes every second node with it; the report has all of them."""
    found = by_rank(*(note(rank, 9, "gradients") for rank in range(1024) if rank != 17))
    silent = "rank 17 does not answer, nobody knows where it was; "
    waiting = 'ranks 0-16, 18-1023 waited 5 s in "gradients" after step 3'
    assert summarize(found, {}, 1024) == silent + waiting
    found = by_rank(*(note(rank, 9, "gradients") for rank in range(4096) if rank // 8 % 2))
    silent = set(range(4096)) - set(found)
    last = {rank: {**note(rank, 9, "gradients"), "host": f"n{rank // 8}"} for rank in silent}
    text = summarize(found, last, 4096)
    assert len(text) < 500
    ranks = "ranks 0-7, 16-23, 32-39, 48-55, 64-71, 80-87, 96-103, 112-119 and 1984 more "
    assert text.startswith(f"{ranks}on n0, n10, n100, n102, n104, n106, n108, n110 and 248 more do not answer, ")


def report_of(world_size, place, store):
    return Report(0, world_size, place, Notes(store, world_size), {}, recent_s=5.0)


@pytest.mark.parametrize("has_store", [True, False], ids=["store", "disk"])
def test_of_a_thousand_ranks_a_few_look_for_the_reports(has_store, tmp_path):
    """If each rank looked for all others, that would be a million requests."""
    (tmp_path / "hang").mkdir()
    store = Store() if has_store else None
    assert [report_of(1024, tmp_path, store).is_collector() for _ in range(6)] == [True] * 3 + [False] * 3
    assert all(report_of(4, tmp_path, store).is_collector() for _ in range(6))


def test_the_report_of_a_thousand_ranks_asks_the_store_a_few_times(tmp_path):
    """The collecting rank asks if all have reported, and what; a request for each of thousands takes seconds."""
    store = Store()
    for rank in range(1024):
        store.values[f"report/{rank}"] = json.dumps(note(rank, 9, "gradients")).encode()
    assert len(report_of(1024, tmp_path, store).gather()) == 1024
    assert store.requests == 2 * 1024 / 256


def test_of_a_thousand_notes_a_few_that_are_missing_cost_a_few_requests():
    store = Store()
    store.values = {f"note/{rank}": b"%d" % rank for rank in range(1024) if rank not in (0, 17, 1023)}
    found = read_notes(store, "note", range(1024))
    assert found == {rank: str(rank) for rank in range(1024) if rank not in (0, 17, 1023)}
    assert store.requests < 3 * 4 * 10
    assert read_notes(store, "note", []) == {}
    assert read_notes(Store(), "note", [5]) == {}


class Clock:
    """A clock that goes on only while a report sleeps, and does what is due."""

    def __init__(self):
        self.now, self.due, self.time = 0.0, [], time.time

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        for item in [item for item in self.due if item[0] <= self.now]:
            self.due.remove(item)
            item[1]()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(report, "time", clock)
    monkeypatch.setattr(Notes, "ask", lambda self, action, otherwise, bound_s=0.0: action(self.store))
    return clock


def test_of_8192_ranks_most_ask_a_few_times_and_wait_for_those_who_collect(tmp_path, clock):
    """If each of them asked ten times a second, the store would not answer those who collect the reports."""
    store = Store()
    store.add("callers", 3)
    (tmp_path / "run").mkdir()
    own = Report(5000, 8192, tmp_path / "run", Notes(store, 8192), {}, recent_s=5.0)
    own.make(json.dumps(note(5000, 9, "gradients")), linger_s=0.0)
    assert clock.now > 20, "the others read 8,192 reports"
    assert 8192 * store.requests / clock.now < 10_000, "requests a second"


def report_with_a_silent_rank(world_size, tmp_path, monkeypatch):
    """Return the report of a rank in the middle, and its store, which has the reports of all others but rank 1."""
    store = Store()
    (tmp_path / "run").mkdir()
    for rank in set(range(world_size)) - {1, world_size // 2}:
        store.set(f"report/{rank}", json.dumps(note(rank, 9, "gradients")))
    own = Report(world_size // 2, world_size, tmp_path / "run", Notes(store, world_size), {}, recent_s=5.0)
    monkeypatch.setattr(own, "_collect", Mock())
    return own, store


def test_of_a_thousand_ranks_the_first_writes_the_report_before_the_others_leave(tmp_path, monkeypatch, clock):
    """Rank 0 is hardly one of the three that collect, and the ranks that leave end all the others."""
    own, store = report_with_a_silent_rank(1024, tmp_path, monkeypatch)
    began_at = []
    own._collect.side_effect = lambda reports: began_at.append((clock.now, len(reports)))
    own.make(json.dumps(note(own.rank, 9, "gradients")), linger_s=0.0)
    [(at, reports)] = began_at
    assert reports == 1023
    assert own.gather_s <= at < own.gather_s + own.poll_s, "the others leave collect_s later"
    assert store.values["done"] == b"512"


@pytest.mark.parametrize("world_size", [8, 1024])
def test_who_does_not_write_the_report_stays_until_it_is_written(tmp_path, monkeypatch, clock, world_size):
    """Its node's agent would end the rank that writes, if that is on the same node."""
    own, store = report_with_a_silent_rank(world_size, tmp_path, monkeypatch)
    store.add("collectors", 1)
    waits_s = own.collect_s if world_size == 8 else 0  # for rank 0, first
    clock.due.append((own.gather_s + waits_s + own.collect_s / 2, lambda: store.set("done", "7")))
    own.make(json.dumps(note(own.rank, 9, "gradients")), linger_s=0.0)
    assert not clock.due
    assert not own._collect.called


@pytest.mark.parametrize("behind_s", [3600, -3600])
def test_reports_are_recent_by_the_clock_of_their_file_server(tmp_path, behind_s):
    (tmp_path / "hang").mkdir()
    for rank, age_s in ((0, 0), (1, 1), (2, 600)):  # the last one is of an earlier launch
        path, dated = tmp_path / "hang" / f"rank-{rank}.txt", time.time() - behind_s - age_s
        path.write_text(f"report {rank}")
        os.utime(path, (dated, dated))
    own = report_of(3, tmp_path, None)
    own.gather_s = 0.0
    assert own.gather() == {0: "report 0", 1: "report 1"}


@pytest.mark.parametrize("call", ["mkdir", "stat", "replace"])
def test_a_disk_that_hangs_does_not_keep_the_report_from_the_terminal(tmp_path, monkeypatch, capsys, call):
    """A dead file server may be what the ranks wait for."""
    released = threading.Event()

    def hang(*_, **__):
        released.wait(60)
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(report, "DISK_S", 0.2)
    monkeypatch.setattr(report.Path, call, hang)
    try:
        Report(0, 1, tmp_path, Notes(None, 1), {}, recent_s=5.0).make(json.dumps(note(0, 9, "gradients")), 0.0)
    finally:
        released.set()
    error = capsys.readouterr().err
    assert error.startswith("error: all ranks answer, and all wait: ")
    assert error.endswith(f"; cannot write {tmp_path}/hang-report.txt: the disk does not answer\n")


def test_a_full_disk_is_named(tmp_path, monkeypatch, capsys):
    fault = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(report.Path, "replace", Mock(side_effect=fault))
    Report(0, 1, tmp_path, Notes(None, 1), {}, recent_s=5.0).make(json.dumps(note(0, 9, "gradients")), 0.0)
    assert capsys.readouterr().err.endswith(f"; cannot write {tmp_path}/hang-report.txt: {fault.strerror}\n")


@pytest.mark.parametrize("seen", ["done", "collectors", "hang-report.txt"])
def test_once_another_rank_has_reported_a_rank_prints_nothing(tmp_path, capsys, seen):
    store = Store()
    if seen == "hang-report.txt":
        (tmp_path / seen).touch()
    else:
        store.add(seen, 1)
    own = Report(0, 1, tmp_path, Notes(store, 1), {}, recent_s=5.0)
    own.collect_s = 0.0
    own.make(json.dumps(note(0, 9, "gradients")), 0.0)
    assert capsys.readouterr().err == ""


def test_the_report_has_the_last_places_of_silent_ranks(tmp_path):
    """Rank 1's is in the store; another was there before the rank that hosts it fell silent."""
    store, last = Store(), {2: json.dumps(note(2, 8, "labels"))}
    store.values["note/1"] = json.dumps(note(1, 8, "metrics")).encode()
    own = Report(0, 3, tmp_path, Notes(store, 3), last, recent_s=5.0)
    own.gather_s = 0.0
    own.make(json.dumps(note(0, 9, "gradients")), 0.0)
    text = own.path.read_text()
    for rank, name in ((1, "metrics"), (2, "labels")):
        assert re.search(
            rf'\nrank {rank} did not answer; last seen \d+\.\d s ago in "{name}" after step 3\n', text
        )
    assert store.values["hung"] == b"0"


def test_a_report_of_a_rank_that_noticed_it_earlier_counts(args, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "_exit", sys.exit)
    other = tmp_path / "hang" / "rank-1.txt"
    other.parent.mkdir()
    other.write_text(json.dumps(note(1, 9, "gradients")))
    os.utime(other, (time.time() - 0.6 * args.timeout_s,) * 2)
    with contextlib.closing(Watch(0, 2, args, None)) as watch, watch("gradients"):
        watch.follow(lambda: 3, tmp_path)
        with pytest.raises(SystemExit):
            watch.end()
    assert capsys.readouterr().err.startswith("error: all ranks answer, and all wait: ")


def test_a_ranks_report_has_the_stacks_that_explain_its_wait():
    go = threading.Event()
    threads = [threading.Thread(target=go.wait, name=name, daemon=True) for name in ("loader", "watch: time")]
    for thread in threads:
        thread.start()
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(describe_rank, note(0, 9, "gradients"), None, threads[1:]).result()
    assert re.search(r"\nthread MainThread:\n +File ", text)
    assert "in describe_rank" not in text
    text = describe_rank(note(0, 9, "gradients"), RuntimeError("lost"), threads[1:])
    go.set()
    assert "\nthread MainThread:\nRuntimeError: lost\n" in text
    assert "\nthread loader:\n" in text
    assert "\nthread watch: time:\n" not in text


def test_without_a_store_the_lowest_rank_that_answers_writes_the_report(tmp_path, monkeypatch, capsys):
    (tmp_path / "hang").mkdir()
    (tmp_path / "hang" / "rank-0.txt").write_text(json.dumps(note(0, 9, "gradients")))
    own = Report(1, 2, tmp_path, Notes(None, 2), {}, recent_s=60.0)
    wait = Mock(side_effect=lambda _: own.path.write_text("by rank 0"))
    monkeypatch.setattr(report, "time", SimpleNamespace(monotonic=time.monotonic, time=time.time, sleep=wait))
    own.make(json.dumps(note(1, 9, "gradients")), 0.0)
    assert (own.path.read_text(), capsys.readouterr().err) == ("by rank 0", "")


def test_a_report_can_be_read_by_those_who_can_read_the_run(tmp_path):
    mask = os.umask(0o022)
    try:
        Report(0, 1, tmp_path, Notes(None, 1), {}, recent_s=5.0).make(json.dumps(note(0, 9, "gradients")), 0.0)
    finally:
        os.umask(mask)
    paths = [tmp_path / "hang-report.txt", *(tmp_path / "hang").iterdir()]
    assert [oct(path.stat().st_mode & 0o777) for path in paths] == [oct(0o644)] * 2


def test_a_report_that_fails_ends_the_rank_all_the_same(watch, monkeypatch, capsys):
    make = Mock(side_effect=KeyError("host"))
    monkeypatch.setattr(Report, "make", make)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as caught:
        watch.end()
    assert caught.value.code == HANG_STATUS
    assert "KeyError: 'host'" in capsys.readouterr().err
    other = threading.Thread(target=watch.end, daemon=True)
    other.start()
    other.join(0.2)
    assert make.call_count == 1, "the thread that has begun ends the process"

"""Times and limits that a page states in figures: the code has the same ones, which other tests replace."""

import pytest

from k8s import apply
from recipes.common import sample
from recipes.common.data import stores
from recipes.common.options import Options
from recipes.common.process import stuck
from recipes.common.world import agreement
from scripts.doctor import __main__ as doctor
from scripts.doctor import gpus, kernel_log, node
from scripts.launch import agent, elastic, local, other_nodes, rank_processes, rejoin, torch_agent
from tests.support import ROOT

FAILURE_ELSEWHERE_S = other_nodes.LOOK_EVERY_S + other_nodes.LOST_GRACE_S + rank_processes.END_SIGNAL_GRACE_S
STATED = [
    ("docs/data.md", "each with up to 32 reads in flight", stores.READS_IN_FLIGHT, 32),
    ("docs/doctor.md", "in two minutes at most", doctor.EXAMINATION_S, 115),
    ("docs/doctor.md", "on one node at most 10 s, even if a driver hangs", doctor.HEALTH_CHECK_S, 9),
    ("docs/doctor.md", "limits the wait for the other nodes (60 s)", doctor.DEFAULT_RDZV_TIMEOUT_S, 60),
    ("docs/doctor.md", "`names: no answer within 20 s`", node.PART_TIMEOUT_S, 20),
    ("docs/elastic.md", "the agent restarts after 1 s", rejoin.RETURN_AFTER_S, 1),
    ("docs/elastic.md", "end after 5 s without the store", elastic.STORE_SILENCE_S * elastic.BEAT_S, 5),
    ("docs/elastic.md", "7 s without a heartbeat", elastic.SILENT_BEATS * elastic.BEAT_S, 7),
    ("docs/elastic.md", "ranks write a checkpoint, for up to 60 s", elastic.CHECKPOINT_TIMEOUT_S, 60),
    ("docs/elastic.md", "for the rest (30 s in the first round)", elastic.FIRST_CALL_S, 30),
    ("docs/elastic.md", "Once `MIN_NODES` have, it waits at most 2 s", elastic.LAST_CALL_S, 2),
    ("docs/elastic.md", "after the round has run for 10 s", elastic.MIN_ROUND_S, 10),
    ("docs/elastic.md", "nodes for `RDZV_TIMEOUT_S` (300 s;", agent.read_node.__defaults__, (300,)),
    ("docs/failures.md", "spawn's starter, ends a minute later", stuck.STUCK_S, 60),
    ("docs/failures.md", "have waited `--timeout-s` (300)", Options.timeout_s, 300),
    ("docs/failures.md", "may take ten times `--timeout-s`", sample.MAX_TIMEOUTS, 10),
    ("docs/failures.md", "`--straggler-window-s` (10 s)", Options.straggler_window_s, 10),
    ("docs/failures.md", "`--straggler-share` (0.25;", Options.straggler_share, 0.25),
    ("docs/resume.md", "gives a recipe 60 s and twice `--timeout-s`", local.STOP_GRACE_S, 60),
    ("docs/resume.md", "two moments at 10 MB/s", agreement.SLOWEST, 10e6),
    ("docs/slurm-admin.md", "The check ends within 10 s", gpus.NVIDIA_SMI_S + kernel_log.READ_S, 9),
    ("docs/your-own.md", "The others then have 30 s to write a checkpoint", rank_processes.STOP_GRACE_S, 30),
    ("docs/your-own.md", "after 60 s with `make run`", local.STOP_GRACE_S, 60),
    ("docs/your-own.md", "the other nodes end their ranks within 15 s", FAILURE_ELSEWHERE_S, 14),
    ("docs/your-own.md", "after 10 minutes, or at the end, a warning says", torch_agent.MEET_WITHIN_S, 600),
    ("k8s/README.md", "`make k8s` retries for 2 min", apply.RETRY_S, 120),
]


@pytest.mark.parametrize(("page", "words", "value", "expected"), STATED, ids=[row[1] for row in STATED])
def test_the_code_has_the_value_that_the_page_states(page, words, value, expected):
    assert words in " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert value == expected

"""The coordinator of an elastic job, with nodes that are played: what it tells them, and how the job ends."""

import asyncio

import pytest

from recipes.common.errors import UserError
from scripts.elastic import coordinator, node, wire
from scripts.local import free_port
from tests.support import run_command


class Player:
    """A node that says what the test lets it say."""

    def __init__(self, port, number):
        self.port, self.number = port, number

    async def join(self, secret="s"):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.say(type="hello", node=self.number, host=f"h{self.number}", secret=secret, port=40000 + self.number)
        self.beating = asyncio.create_task(self.beat())
        return self

    def say(self, **message):
        wire.say(self.writer, **message)

    async def beat(self):
        while True:
            self.say(type="beat")
            await asyncio.sleep(0.05)

    async def hears(self, kind):
        """Return the next message that is no beat, which must be of the kind."""
        while (message := await wire.hear(self.reader, 5)) and message["type"] == "beat":
            pass
        assert message, f"node {self.number} heard nothing more, and should have heard {kind}"
        assert message["type"] == kind, message
        return message

    def ended(self, start, status=0):
        self.say(type="ended", round=start["round"], status=status, port=41000 + self.number)

    def vanish(self):
        self.beating.cancel()
        wire.hang_up(self.writer)


@pytest.fixture
def quick(monkeypatch):
    for name in ("NEWCOMER_WAIT_S", "TRAIN_S", "ERROR_GRACE_S"):
        monkeypatch.setattr(coordinator, name, 0.1)
    monkeypatch.setenv("RDZV_ID", "s")
    monkeypatch.setattr(coordinator, "SILENCE_S", 0.6)
    monkeypatch.setattr(wire, "BEAT_S", 0.05)


def play(story, nodes=3, min_nodes=2, max_restarts=3, timeout_s=1):
    """Run a coordinator beside story(players), which ends with the job; return the exit status."""
    port = free_port()
    words = ["--port", str(port), "--listen", "127.0.0.1", "--nodes", str(nodes), "--min-nodes", str(min_nodes)]
    words += ["--max-restarts", str(max_restarts), "--timeout-s", str(timeout_s)]

    async def run():
        serving = asyncio.create_task(coordinator.Coordinator(coordinator.parse(words)).serve())
        await asyncio.sleep(0.05)
        players = [Player(port, number) for number in range(nodes)]
        await asyncio.wait_for(story(*players), 10)
        for player in players:
            if hasattr(player, "writer"):
                player.vanish()
        status = await asyncio.wait_for(serving, 15)
        await asyncio.gather(*(p.beating for p in players if hasattr(p, "beating")), return_exceptions=True)
        return status

    return asyncio.run(run())


async def join_all(*players):
    for player in players:
        await player.join()
    return [await player.hears("start") for player in players]


def places(starts):
    return [(start["round"], start["nnodes"], start["node_rank"]) for start in starts]


def test_all_end_well(quick, capsys):
    async def story(*players):
        starts = await join_all(*players)
        assert places(starts) == [(1, 3, 0), (1, 3, 1), (1, 3, 2)]
        assert {(start["master_addr"], start["master_port"]) for start in starts} == {("127.0.0.1", 40000)}
        for player, start in zip(players, starts, strict=True):
            player.ended(start)
        for player in players:
            assert (await player.hears("end-job"))["status"] == 0

    assert play(story) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("silent", [False, True], ids=["gone", "silent"])
def test_the_rest_go_on_without_a_lost_node_and_take_it_in_again(quick, capsys, silent):
    async def story(a, b, c):
        await join_all(a, b, c)
        if silent:
            a.beating.cancel()
        else:
            a.vanish()
        for player in (b, c):
            await player.hears("end-round")
            player.ended({"round": 1}, status=1)
        starts = [await player.hears("start") for player in (b, c)]
        assert places(starts) == [(2, 2, 0), (2, 2, 1)]
        assert {start["master_port"] for start in starts} == {41001}, "the head's newest port"
        a.vanish()
        await a.join()
        await asyncio.sleep(0.4)
        b.say(type="training", round=2)  # not before the round has won anything
        for player, start in zip((b, c), starts, strict=True):
            await player.hears("stop")
            player.ended(start)
        starts = [await player.hears("start") for player in (a, b, c)]
        assert places(starts) == [(3, 3, 0), (3, 3, 1), (3, 3, 2)]
        for player, start in zip((a, b, c), starts, strict=True):
            player.ended(start)

    assert play(story) == 0
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "elastic: round 1 ended: lost node 0 (h0)"
    assert told[1] == "elastic: round 2: 2 of 3 nodes"


def test_nobody_is_waited_for_while_no_round_trains(quick):
    async def story(a, b, c):
        await join_all(a, b, c)
        c.vanish()
        starts = []
        for player in (a, b):
            await player.hears("end-round")
            player.ended({"round": 1})
        starts = [await player.hears("start") for player in (a, b)]
        await c.join()
        await asyncio.sleep(0.5)
        a.ended(starts[0])
        b.ended(starts[1])
        assert (await c.hears("end-job"))["status"] == 0, "the job was done before c had a part in it"

    assert play(story) == 0


@pytest.mark.parametrize(("failures", "max_restarts", "expected"), [(2, 2, 0), (2, 1, 1), (1, 0, 1)])
def test_only_so_many_rounds(quick, capsys, failures, max_restarts, expected):
    async def story(*players):
        starts = await join_all(*players)
        for failure in range(failures):
            culprit = players[failure]  # another one each time
            culprit.ended(starts[failure], status=137)
            for player in players:
                if player is not culprit and failure <= max_restarts:
                    await player.hears("end-round")
                    player.ended({"round": failure + 1})
            if failure == max_restarts:
                assert (await players[0].hears("end-job"))["status"] == 1
                return
            starts = [await player.hears("start") for player in players]
        for player, start in zip(players, starts, strict=True):
            player.ended(start)

    assert play(story, max_restarts=max_restarts) == expected
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == expected
    assert not errors or f"restart {max_restarts} of at most {max_restarts} (MAX_RESTARTS)" in errors[0]


def test_a_node_whose_ranks_fail_twice_in_a_row_is_left_out(quick, capsys):
    async def story(a, b, c):
        starts = await join_all(a, b, c)
        for round_number in (1, 2):
            a.ended(starts[0], status=1)  # it has lost c, and says so first
            c.ended(starts[2], status=137)
            await b.hears("end-round")
            b.ended({"round": round_number})
            if round_number == 1:
                starts = [await player.hears("start") for player in (a, b, c)]
        assert (await c.hears("end-job"))["status"] == 1
        c.vanish()
        starts = [await player.hears("start") for player in (a, b)]
        assert places(starts) == [(3, 2, 0), (3, 2, 1)]
        a.ended(starts[0])
        b.ended(starts[1])

    assert play(story) == 0
    assert "node 2 (h2) is left out: its ranks have failed in 2 rounds in a row" in capsys.readouterr().err


def test_too_few_nodes_are_one_error(quick, capsys):
    async def story(a, b, c):
        await join_all(a, b, c)
        b.vanish()
        c.vanish()
        await a.hears("end-round")
        a.ended({"round": 1})
        assert (await a.hears("end-job"))["status"] == 1

    assert play(story) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: 1 of at least 2 nodes within 1 s (there: node 0 (h0); lost: node ")


def test_a_refusal_is_not_tried_again(quick):
    async def story(*players):
        starts = await join_all(*players)
        for player, start in zip(players, starts, strict=True):
            player.ended(start, status=2)

    assert play(story) == 2


def test_a_stop_signal_to_all_ends_the_job(quick):
    async def story(*players):
        starts = await join_all(*players)
        for player, start in zip(players, starts, strict=True):
            player.say(type="leaving")
            player.ended(start)
        assert (await players[0].hears("end-job"))["status"] == 0

    assert play(story) == 0


def test_a_stop_signal_to_one_lets_the_others_go_on(quick):
    async def story(a, b, c):
        starts = await join_all(a, b, c)
        b.say(type="leaving")
        for player, start in zip((a, b, c), starts, strict=True):
            player.ended(start)
        starts = [await player.hears("start") for player in (a, c)]
        assert places(starts) == [(2, 2, 0), (2, 2, 1)]
        a.ended(starts[0])
        c.ended(starts[1])

    assert play(story) == 0


def test_a_stranger_is_turned_away(quick):
    async def story(a, b):
        stranger = await Player(a.port, 1).join(secret="another")
        assert await wire.hear(stranger.reader, 5) is None, "hung up on"
        stranger.vanish()
        await join_all(a, b)
        for player in (a, b):
            player.ended({"round": 1})

    assert play(story, nodes=2) == 0


@pytest.mark.parametrize("secret", [None, ""])
def test_without_a_secret_nobody_starts(monkeypatch, capsys, secret):
    """An empty one would let everybody in."""
    for name, value in {"RDZV_ID": secret, "MASTER_ADDR": "127.0.0.1", "MIN_NODES": "1"}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert coordinator.main(["--port", str(free_port()), "--nodes", "1", "--min-nodes", "1"]) == 2
    assert node.main(["ddp", "--name", "x"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("error: RDZV_ID is not set; set it on all nodes to a secret") for line in lines)


def test_a_rounds_options(tmp_path):
    words = ["--runs-dir", str(tmp_path), "--name", "x"]
    assert node.options_of(words, is_first=True) == words
    assert node.options_of(words, is_first=False) == [*words, "--resume", "auto"]
    other = [*words, "--resume", "other.pt"]
    assert node.options_of(other, is_first=False) == [*other, "--no-overwrite"], "it has not begun yet"
    (tmp_path / "x").mkdir()
    (tmp_path / "x/config.json").touch()
    assert node.options_of(other, is_first=False) == [*other, "--resume", "auto"]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"NNODES": "2", "MIN_NODES": "3"}, "MIN_NODES 3 of NNODES 2"),
        ({"MIN_NODES": "0"}, "MIN_NODES wants a whole number of at least 1"),
        ({"MIN_NODES": "1", "COORDINATOR": "here"}, "COORDINATOR wants host:port"),
    ],
)
def test_settings_that_make_no_sense(monkeypatch, variables, words):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=words):
        node.read_settings()


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (("MIN_NODES=3",), "MIN_NODES 3 is more than NODES 2"),
        (("MIN_NODES=x",), "MIN_NODES: expected a whole number, got 'x'"),
        (("MIN_NODES=1", "MAX_RESTARTS=1001"), "MAX_RESTARTS wants a whole number from 0 to 1000"),
        (("MAX_RESTARTS=1",), "MAX_RESTARTS belongs to an elastic job"),
        (("MIN_NODES=1", "RECIPE=single"), "single is not for an elastic job"),
    ],
)
def test_make_run_refuses(words, refusal):
    result = run_command("make", "run", "RECIPE=ddp", "NODES=2", *words)
    assert result.status == 2
    assert f"error: {refusal}" in result.stderr

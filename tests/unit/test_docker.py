"""What of docker/ can be checked without an engine: shared layers, what an image holds, each node's part."""

import re
from pathlib import Path

import pytest
import yaml

from scripts import compose
from tests.support import ROOT

DOCKERFILES = [ROOT / f"docker/{name}.Dockerfile" for name in ("apex", "ddp", "horovod")]


def shared_part(path):
    text = path.read_text()
    return text[
        text.index("# --- What all images share") : text.index("\n# --- ", text.index("# --- What all") + 1)
    ]


def test_images_share_their_first_layers():

    [part] = {shared_part(path) for path in DOCKERFILES}
    assert "requirements/run.txt" in part


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_is_pinned_and_ends_as_an_ordinary_user(path):
    text = path.read_text()
    for base in re.findall(r"^ARG (?:BASE|BUILD)_IMAGE=(\S+)", text, re.MULTILINE):
        assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-(base|devel)-ubuntu24\.04", base)
    final = text[text.rindex("\nFROM ") :]
    assert "USER 10001:10001\n" in final
    assert final.index("USER ") > final.rindex("RUN ")
    assert 'ENTRYPOINT ["scripts/launch.sh"]' in final
    assert "org.opencontainers.image.revision" in final


def test_what_goes_into_an_image_is_listed():
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    for line in lines[1:]:
        assert line in ("**/__pycache__", "!docker/wheels") or (ROOT / line.removeprefix("!")).exists(), line


def test_nodes_differ_in_name_and_rank_alone():
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    first, second = services["node0"], services["node1"]
    assert (first["hostname"], second["hostname"]) == ("node0", "node1")
    assert first["environment"]["MASTER_ADDR"] == "node0"
    assert second["environment"] == {**first["environment"], "NODE_RANK": "1"}
    assert {**second, "hostname": "node0", "environment": first["environment"]} == first


def test_more_nodes_and_their_gpus():
    assert compose.override(2, [[], []]) == {"services": {}}
    services = compose.override(3, [["0", "1"], ["2", "3"], ["4", "5"]])["services"]
    for node, gpus in (("node0", ["0", "1"]), ("node1", ["2", "3"]), ("node2", ["4", "5"])):
        [device] = services[node]["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "device_ids": gpus, "capabilities": ["gpu"]}
    assert services["node2"]["extends"] == {"file": str(ROOT / "docker/compose.yaml"), "service": "node1"}
    assert services["node2"]["environment"] == {"NODE_RANK": "2"}
    assert "extends" not in services["node0"]


def test_folders_of_the_caller_become_those_of_the_container(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine/ddp-001").mkdir(parents=True)
    options = ["--runs-dir", "mine", "--epochs", "3", "--data-dir=/mnt/images"]
    folders, words = compose.take_folders("ddp", options)
    assert words == ["--epochs", "3", "--name", "ddp-002", "--runs-dir", "/runs", "--data-dir", "/data"]
    assert (folders.runs, folders.data, folders.run) == (
        tmp_path / "mine",
        Path("/mnt/images"),
        tmp_path / "mine/ddp-002",
    )
    assert compose.take_folders("probe", ["--device", "cpu"])[1] == ["--device", "cpu"]


@pytest.mark.parametrize("words", [["--min-nodes", "2"], ["--max-restarts", "3"]])
def test_an_elastic_job_is_refused(capsys, words):
    with pytest.raises(SystemExit) as caught:
        compose.main(["ddp", "--nodes", "3", *words])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("error: containers that are lost do not come back: ")

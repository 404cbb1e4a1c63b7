"""What of docker/ can be checked without an engine: shared layers, what an image holds, each node's part."""

import re
from pathlib import Path

import pytest
import yaml

from docker import compose
from tests.support import ROOT, run_command

DOCKERFILES = [ROOT / f"docker/{name}.Dockerfile" for name in ("apex", "ddp", "horovod")]


def shared_part(path):
    text = path.read_text()
    return text[
        text.index("# --- What all images share") : text.index("\n# --- ", text.index("# --- What all") + 1)
    ]


def test_images_share_their_first_layers():

    [part] = {shared_part(path) for path in DOCKERFILES}
    assert "requirements/run.txt" in part


def test_images_hold_what_nccl_loads_for_rdma():
    """Without libibverbs and a provider NCCL goes over TCP; EFA's installer is taken on request, by its digest."""
    part = shared_part(DOCKERFILES[0])
    packages = re.search(r"--no-install-recommends \\\n(.*?)\\\n", part, re.DOTALL)[1].split()
    assert {"libibverbs1", "ibverbs-providers"} <= set(packages)
    assert "ARG EFA_INSTALLER=\n" in part
    assert part.index("sha256sum --check") < part.index("efa_installer.sh")


def test_an_installer_without_a_digest_is_refused():
    env = {"EFA_INSTALLER": "1.43.2", "DOCKER": "true"}
    result = run_command("docker/image.sh", "build", "ddp", **env)
    assert result.status == 2
    assert "without the SHA-256 of aws-efa-installer-1.43.2.tar.gz" in result.errors[0]


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


def test_by_hand_records_go_where_the_container_may_write():
    """Without OPTIONS; make run sets them, to nothing for the probe. No other registry's image is taken."""
    for service in yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"].values():
        assert service["command"] == "${RECIPE:-ddp} ${OPTIONS---runs-dir /runs --data-dir /data}"
        assert {volume.rsplit("}:", 1)[1] for volume in service["volumes"]} == {"/runs", "/data:ro"}
        assert service["pull_policy"] == "never"


def test_more_nodes_and_their_gpus():
    assert compose.override(2, [[], []]) == {"services": {}}
    services = compose.override(3, [["0", "1"], ["2", "3"], ["4", "5"]])["services"]
    for node, gpus in (("node0", ["0", "1"]), ("node1", ["2", "3"]), ("node2", ["4", "5"])):
        [device] = services[node]["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "device_ids": gpus, "capabilities": ["gpu"]}
    assert services["node2"]["extends"] == {"file": str(ROOT / "docker/compose.yaml"), "service": "node1"}
    assert services["node2"]["environment"] == {"NODE_RANK": "2"}
    assert "extends" not in services["node0"]


def test_a_script_has_its_own_path_in_the_containers(tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    (tmp_path / "code/train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCRIPT", "code/train.py")
    monkeypatch.setenv("RUNS_DIR", "mine")
    folders, own = compose.take_script("")
    assert (folders.runs, folders.run) == (tmp_path / "mine", tmp_path / "mine/train-001")
    paths = {"SCRIPT": f"{tmp_path}/code/train.py", "WORKDIR": str(tmp_path), "RUN_DIR": "/runs/train-001"}
    services = compose.override(3, [[], [], []], own)["services"]
    for number in range(3):
        environment = services[f"node{number}"]["environment"]
        assert environment == {**paths, "RESUME": "none", **({"NODE_RANK": "2"} if number == 2 else {})}
        seen = [(volume["source"], volume["target"]) for volume in services[f"node{number}"]["volumes"]]
        assert seen == [(str(tmp_path), str(tmp_path)), (f"{tmp_path}/code", f"{tmp_path}/code")]


def test_modules_of_the_callers_own_are_seen_in_the_containers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert compose.take_modules(["--model", "vit-tiny", "--data=digits", "--epochs", "2"]) == {}
    for options in (["--epochs", "2", "--model", "mine:net"], ["--data=mine:points"], ["--task", "mine:Fit"]):
        own = compose.take_modules(options)
        assert own["environment"] == {"PYTHONPATH": "/code"}
        [volume] = own["volumes"]
        assert volume == {"type": "bind", "source": str(tmp_path), "target": "/code", "read_only": True}


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
    assert compose.main(["ddp", "--nodes", "3", *words]) == 2
    assert capsys.readouterr().err.startswith("error: containers that are lost do not come back: ")

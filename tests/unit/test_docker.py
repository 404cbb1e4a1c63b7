"""What of docker/ can be checked without an engine: shared layers, what an image holds, each node's part."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from docker import compose
from scripts.launch.command import image_of
from tests.conftest import refused
from tests.support import ROOT, run_command, write_program

DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
STAGES = re.split(r"^(?=FROM )", DOCKERFILE, flags=re.MULTILINE)[1:]
"""The stages of the Dockerfile, from FROM to the next one."""


def stage(first_line):
    [found] = [text for text in STAGES if text.startswith(f"{first_line}\n")]
    return found


def test_images_share_their_first_layers():
    part = stage("FROM ${BASE_IMAGE} AS base")
    assert "ARG LOCK=run.txt\n" in part
    assert "COPY requirements/${LOCK} /tmp/run.txt\n" in part
    images = {image_of(path.parent.name) for path in ROOT.glob("recipes/*/train.py")}
    assert images == {"ddp", "horovod", "apex"}
    for image in images:
        assert f'CMD ["{image}"]\n' in stage(f"FROM base AS {image}")


def test_the_images_user_can_read_a_checkout_that_was_made_under_umask_077(tmp_path):
    """COPY keeps the modes of the checkout."""
    prepare, _ = re.findall(r"^RUN (.*)", stage("FROM ${RECIPE}"), re.MULTILINE)
    for name in ("recipes", "scripts", "slurm"):
        (tmp_path / name).mkdir(mode=0o700)
        (tmp_path / name / "train.py").touch(mode=0o600)
    (tmp_path / "scripts/launch.sh").touch(mode=0o700)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"env": {"PATH": path}, "umask": 0o022}  # those of a build
    subprocess.run(["bash", "-c", prepare], cwd=tmp_path, **own, check=True, timeout=30)
    assert all(found.stat().st_mode & 0o044 == 0o044 for found in tmp_path.rglob("*"))
    folders = [*tmp_path.glob("*/"), tmp_path / "scripts/launch.sh"]
    assert all(found.stat().st_mode & 0o011 == 0o011 for found in folders)
    assert not (tmp_path / "slurm/train.py").stat().st_mode & 0o111
    is_started = r"USER 10001:10001\n# .*\nRUN scripts/launch.sh probe --help >/dev/null\n\Z"
    assert re.search(is_started, DOCKERFILE), "the build fails if the user cannot start a recipe"


def test_images_hold_what_nccl_loads_for_rdma():
    """Without libibverbs and a provider NCCL uses TCP; EFA's installer is taken on request, with its digest."""
    part = stage("FROM ${BASE_IMAGE} AS base")
    packages = re.search(r"--no-install-recommends \\\n(.*?)\\\n", part, re.DOTALL)[1].split()
    assert {"libibverbs1", "ibverbs-providers"} <= set(packages)
    assert "ARG EFA_INSTALLER=\n" in part
    assert part.index("sha256sum --check") < part.index("efa_installer.sh")


def test_images_get_the_driver_s_library_for_the_jpeg_engines():
    """nvidia/cuda asks for compute,utility; nvJPEG opens libnvcuvid.so.1, which the engine mounts for video."""
    part = stage("FROM ${BASE_IMAGE} AS base")
    [asked] = re.findall(r"^ENV NVIDIA_DRIVER_CAPABILITIES=(.*)$", part, re.MULTILINE)
    assert asked.split(",") == ["compute", "utility", "video"]


def test_images_start_under_enroot():
    """It starts containers by a login shell, and Debian's /etc/profile sets PATH.

    Its hook for MELLANOX_* starts no container on a node without /sys/class/infiniband.
    """
    assert "MELLANOX" not in DOCKERFILE
    folder = re.search(r"ENV PATH=(\S+?):\$PATH", stage("FROM ${BASE_IMAGE} AS base"))[1]
    assert f'"PATH={folder}:\\$PATH" >/etc/profile.d/' in stage("FROM ${BASE_IMAGE} AS base")


def test_an_installer_without_a_digest_is_refused():
    env = {"EFA_INSTALLER": "1.43.2", "DOCKER": "true"}
    result = run_command("docker/image.sh", "build", "ddp", **env)
    assert result.status == 2
    assert "without the SHA-256 of aws-efa-installer-1.43.2.tar.gz" in result.errors[0]


DIGEST = "sha256:" + "5" * 64
RECORDED_DOCKER = f"""#!/usr/bin/env bash
echo "$*" >>"$CALLS"
case "$*" in
"buildx imagetools "*) echo "${{ANSWER-{DIGEST}}}" ;;
"buildx inspect") echo "Driver:  $DRIVER" ;;
"image inspect "*) echo 6000000000 ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of the files that docker/image.sh reads, and a docker that records its calls."""
    for name in ("docker", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "wheels"))
    for recipe in ("ddp", "apex"):
        (tmp_path / "recipes" / recipe).mkdir(parents=True)
        (tmp_path / "recipes" / recipe / "train.py").touch()
    write_program(tmp_path / "docker.sh", RECORDED_DOCKER)
    return tmp_path


def image(folder, *argv, **env):
    """Run docker/image.sh in a copy; return its result, and docker's last calls without image inspections."""
    calls = folder / "calls"
    calls.write_text("")
    own = {"DOCKER": str(folder / "docker.sh"), "CALLS": str(calls), "DRIVER": "docker-container"}
    result = run_command(str(folder / "docker/image.sh"), *argv, **{**own, **env})
    return result, [line for line in calls.read_text().splitlines() if "build " in line or "push" in line]


def test_a_stand_in_has_only_packages_that_debian_has_signed():
    """Without Debian's keys, debootstrap would only warn."""
    [line] = re.findall("^debootstrap .*", (ROOT / "docker/stand-in.sh").read_text(), re.MULTILINE)
    assert "--force-check-gpg" in line.split()


def test_an_image_has_a_second_name_that_no_registry_can_have(checkout):
    """Builds and Compose 1 pull an image that is missing, and cluster-recipes/ddp may be somebody else's."""
    used = re.findall(r"^ARG IMAGE=(.*)", (ROOT / "docker/slurm.Dockerfile").read_text(), re.MULTILINE)
    compose = yaml.safe_load((ROOT / "docker/slurm.compose.yaml").read_text())
    assert [f"${{IMAGE:-{name}}}" for name in used] == [compose["services"]["slurm"]["build"]["args"]["IMAGE"]]
    nodes = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"].values()
    assert {node["image"] for node in nodes} == {f"${{IMAGE:-{name}}}" for name in used}
    _, [call] = image(checkout, "build", "ddp")
    assert "--build-arg RECIPE=ddp " in call
    assert [f"registry.invalid/{name}" for name in re.findall("--tag (cluster-recipes/\\S+)", call)] == used
    assert f"--tag {used[0]} " in call
    _, [call] = image(checkout, "build", "ddp", REGISTRY="r.example")
    assert re.findall(r"--tag (\S+)", call) == ["r.example/cluster-recipes/ddp:latest"]


def test_base_images_are_locked_by_digest(checkout):
    result, _ = image(checkout, "lock")
    assert result.status == 0, result.stderr
    base, build = (f"nvidia/cuda:13.0.1-{part}-ubuntu24.04@{DIGEST}" for part in ("base", "devel"))
    assert (checkout / "docker/images.lock").read_text() == f"BASE_IMAGE={base}\nBUILD_IMAGE={build}\n"
    result, [call] = image(checkout, "build", "apex")
    assert "--build-arg RECIPE=apex " in call
    assert f"--build-arg BASE_IMAGE={base} --build-arg BUILD_IMAGE={build} " in call
    assert "a tag, which can move" not in result.stdout
    result, [call] = image(checkout, "build", "apex", BASE_IMAGE="mine:1")
    assert "--build-arg BASE_IMAGE=mine:1 --build-arg BUILD_IMAGE=mine:1 " in call
    assert "a tag, which can move" in result.stdout
    result, _ = image(checkout, "lock", ANSWER="")
    assert (result.status, len(result.errors)) == (2, 1)


@pytest.mark.parametrize(
    ("lock", "variable"),
    [
        ("", "BASE_IMAGE"),
        (f"BASE_IMAGE=nvidia/cuda:12.9.0-base-ubuntu24.04@{DIGEST}\n", "BASE_IMAGE"),
        (f"BASE_IMAGE=nvidia/cuda:13.0.1-base-ubuntu24.04@{DIGEST[:-1]}\n", "BASE_IMAGE"),
        (f"BASE_IMAGE=nvidia/cuda:13.0.1-base-ubuntu24.04@{DIGEST}\n", "BUILD_IMAGE"),
    ],
    ids=["empty", "old", "cut", "half"],
)
def test_a_lock_of_other_base_images_is_refused(checkout, lock, variable):
    (checkout / "docker/images.lock").write_text(lock)
    result, calls = image(checkout, "build", "apex")
    assert (result.status, calls) == (2, [])
    assert result.errors[0].startswith(f"error: docker/images.lock has no digest of the {variable} of docker/")
    assert image(checkout, "build", "apex", BASE_IMAGE="mine:1")[0].status == 0
    own = image(checkout, "build", "apex", BUILD_IMAGE="mine:1")[0].status
    assert own == (2 if variable == "BASE_IMAGE" else 0), "a digest that is not used need not be there"


def test_an_image_is_attested_where_a_builder_can(checkout):
    registry = {"REGISTRY": "r.example", "TAG": "1", "ATTEST": "1"}
    result, [call] = image(checkout, "build", "ddp", **registry)
    assert call.startswith("buildx build --push --sbom=true --provenance=mode=max ")
    assert result.stdout.splitlines()[-1].startswith("image: r.example/cluster-recipes/ddp:1 pushed with SBOM")
    for env, words in (({"DRIVER": "docker"}, "ATTEST needs a builder"), ({"REGISTRY": ""}, "ATTEST pushes")):
        result, calls = image(checkout, "build", "ddp", **{**registry, **env})
        assert (result.status, calls) == (2, [])
        assert words in result.errors[0]
    for env in ({}, {"ATTEST": ""}, {"ATTEST": "0", "REGISTRY": "r.example"}):
        result, [call] = image(checkout, "build", "ddp", **env)
        assert call.startswith("build ")
        assert "no SBOM and no provenance was made" in result.stdout


def test_an_image_of_another_cuda_has_its_own_lock_and_base(checkout):
    index = {"TORCH_INDEX": "https://download.pytorch.org/whl/cu128"}
    based = {**index, "BASE_IMAGE": "ubuntu:24.04"}
    for env, words in ((index, "needs a base without CUDA 13"), (based, "no requirements/run-cu128.txt")):
        result, calls = image(checkout, "build", "ddp", **env)
        assert (result.status, calls) == (2, [])
        assert words in result.errors[0]
    (checkout / "requirements/run-cu128.txt").touch()
    _, [call] = image(checkout, "build", "ddp", **based)
    assert f"--build-arg TORCH_INDEX={index['TORCH_INDEX']} --build-arg LOCK=run-cu128.txt " in call


def test_a_lock_of_another_cuda_is_made_from_its_index(tmp_path):
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    shutil.copytree(ROOT / "scripts/dev", tmp_path / "scripts/dev")
    write_program(tmp_path / "uv", f'#!/usr/bin/env bash\necho "$@" >{tmp_path}/call\ncat >{tmp_path}/seen\n')
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TORCH_INDEX": "https://x/whl/cu126"}
    env["TORCH"] = "torch==2.11.0 torchvision==0.26.0"
    result = run_command(str(tmp_path / "scripts/dev/lock.sh"), check=True, **env)
    seen = (tmp_path / "seen").read_text()
    assert re.findall(r"^torch.*", seen, re.MULTILINE) == ["torch==2.11.0+cu126", "torchvision==0.26.0+cu126"]
    assert "nvidia-nvimgcodec-cu12[nvjpeg];" in seen
    assert "cu13" not in seen
    call = (tmp_path / "call").read_text().split()
    assert {"--generate-hashes", "https://x/whl/cu126", "run-cu126.txt"} <= set(call)
    result = run_command(str(tmp_path / "scripts/dev/lock.sh"), **{**env, "TORCH": "torch"})
    assert (result.status, len(result.errors)) == (2, 1)


DEBIAN = "http://snapshot.debian.org/archive/debian/20261101T000000Z"
SECURITY = DEBIAN.replace("/debian/", "/debian-security/")
UBUNTU = "https://snapshot.ubuntu.com/ubuntu/20261101T000000Z"
TODAYS = "deb http://deb.debian.org/debian bookworm main"
NVIDIAS = "URIs: https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2404/x86_64"
TWO_SCHEMES = f"deb {UBUNTU}/ noble main\ndeb {UBUNTU.replace('https', 'http')} noble main"
BY_HTTPS = f"deb {DEBIAN.replace('http', 'https')} sid main"


@pytest.mark.parametrize(
    ("url", "before", "after"),
    [
        (DEBIAN, TODAYS, f"deb {DEBIAN} bookworm main"),
        (DEBIAN, "URIs: http://deb.debian.org/debian\nURIs: http://deb.debian.org/debian-security",
            f"URIs: {DEBIAN}\nURIs: {SECURITY}"),
        (DEBIAN, f"{TODAYS}\ndeb [signed-by=/x] http://security.debian.org/debian-security bookworm-security main",
            f"deb {DEBIAN} bookworm main\ndeb [signed-by=/x] {SECURITY} bookworm-security main"),
        (UBUNTU, f"URIs: http://archive.ubuntu.com/ubuntu/\nURIs: http://security.ubuntu.com/ubuntu/\n{NVIDIAS}",
            f"URIs: {UBUNTU}\nURIs: {UBUNTU}\n{NVIDIAS}"),
        (UBUNTU, TWO_SCHEMES, TWO_SCHEMES),
        (DEBIAN, BY_HTTPS, BY_HTTPS),
        (UBUNTU, TODAYS, None),
        ("yesterday", TODAYS, None),
        ("", TODAYS, TODAYS),
    ],
    ids=["list", "security", "old security", "ubuntu", "slash", "https", "other", "none", "unset"],
)  # fmt: skip
def test_packages_of_a_distribution_come_from_a_snapshot(url, before, after, tmp_path):
    sources = tmp_path / "etc/apt/sources.list.d/x.sources"
    sources.parent.mkdir(parents=True)
    sources.write_text(before + "\n")
    result = run_command("docker/apt-snapshot.sh", url, str(tmp_path))
    if after is None:
        assert (result.status, len(result.errors)) == (2, 1)
        assert sources.read_text() == before + "\n"
        return
    assert (result.status, sources.read_text()) == (0, after + "\n"), result.stderr
    assert (tmp_path / "etc/apt/apt.conf.d/50snapshot").exists() is bool(url)
    kept = [f"{address} is not a snapshot" for address in re.findall(r"https?://developer\S+", after)]
    assert [line.partition("; ")[0] for line in result.stderr.splitlines()] == kept


@pytest.mark.parametrize("first_line", ["FROM ${BASE_IMAGE} AS base", "FROM ${BUILD_IMAGE} AS compilers"])
def test_every_base_takes_its_packages_from_the_snapshot(first_line):
    part = stage(first_line)
    assert "ARG APT_SNAPSHOT=\n" in part
    assert part.index('apt-snapshot.sh "$APT_SNAPSHOT"') < part.index("apt-get update")


def test_an_image_is_pinned_and_ends_as_an_ordinary_user():
    bases = re.findall(r"^ARG (?:BASE|BUILD)_IMAGE=(\S+)", DOCKERFILE, re.MULTILINE)
    assert len(bases) == 2
    for base in bases:
        assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-(base|devel)-ubuntu24\.04", base)
    external = [text.split()[1] for text in STAGES if text.startswith("FROM $")]
    assert external == ["${BASE_IMAGE}", "${BUILD_IMAGE}", "${RECIPE}"]
    assert "ARG RECIPE=ddp\n" in DOCKERFILE, "by default the last stage builds on one of this file"
    final = STAGES[-1]
    assert re.findall("^USER .*", final, re.MULTILINE) == ["USER 10001:10001"]
    assert "org.opencontainers.image.revision" in final
    assert "ARG RECIPE\n" in final, "the label's name needs it"
    assert 'ENTRYPOINT ["scripts/launch.sh"]\n' in STAGES[0]
    assert not any("ENTRYPOINT" in text for text in STAGES[1:]), "another ENTRYPOINT would drop the recipe's CMD"


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
    """Started by hand, OPTIONS is unset; make run sets it, to nothing for the probe. No image is pulled."""
    for service in yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"].values():
        assert service["command"] == "${RECIPE:-ddp} ${OPTIONS---runs-dir /runs --data-dir /data}"
        assert {volume.rsplit("}:", 1)[1] for volume in service["volumes"]} == {"/runs", "/data:ro"}
        assert service["pull_policy"] == "never"


def test_its_help_is_its_own(capsys):
    with pytest.raises(SystemExit):
        compose.main(["--help"])
    shown = capsys.readouterr().out
    assert "usage: python -m docker.compose " in shown
    assert "in containers on this machine" in shown
    assert "--nodes" in shown
    assert not re.search("--min-nodes|--max-restarts|--list", shown), "they are refused"


def spec(folder, **own):
    """Return what containers get for a run in a folder."""
    return compose.ContainerSpec(folder / "mine", folder / "data", [], **own)


def test_more_nodes_and_their_gpus(tmp_path):
    services = compose.compose_override(3, [["0", "1"], ["2", "3"], ["4", "5"]], spec(tmp_path))["services"]
    for node, gpus in (("node0", ["0", "1"]), ("node1", ["2", "3"]), ("node2", ["4", "5"])):
        [device] = services[node]["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "device_ids": gpus, "capabilities": ["gpu"]}
        assert services[node]["shm_size"] == "16gb"
    assert services["node2"]["extends"] == {"file": str(ROOT / "docker/compose.yaml"), "service": "node1"}
    assert services["node2"]["environment"] == {"NODE_RANK": "2"}
    assert services["node2"]["hostname"] == "node2"
    assert "extends" not in services["node0"]
    assert "deploy" not in compose.compose_override(1, [[]], spec(tmp_path))["services"]["node0"]


def test_a_script_has_its_own_path_in_the_containers(tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    (tmp_path / "code/train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCRIPT", "code/train.py")
    monkeypatch.setenv("RUNS_DIR", "mine")
    own = compose.script_spec("", ["--lr", "1"])
    assert (own.run, own.options) == (tmp_path / "mine/train-001", ["--lr", "1"])
    paths = {"SCRIPT": f"{tmp_path}/code/train.py", "WORKDIR": str(tmp_path), "RUN_DIR": "/runs/train-001"}
    services = compose.compose_override(3, [[], [], []], own)["services"]
    for number in range(3):
        environment = services[f"node{number}"]["environment"]
        assert environment == {**paths, "RESUME": "none", "NODE_RANK": str(number)}
        seen = [(volume["source"], volume["target"]) for volume in services[f"node{number}"]["volumes"]]
        assert seen == [(str(tmp_path), str(tmp_path)), (f"{tmp_path}/code", f"{tmp_path}/code")]
    with refused(f"another job runs in {tmp_path}/mine/train-001; wait for its end, or choose another NAME"):
        compose.script_spec("train-001", [])


def test_a_script_in_tmp_is_refused(tmp_path, monkeypatch):
    """The containers have a /tmp of their own."""
    own = {"SCRIPT": "/tmp/train.py", "WORKDIR": str(tmp_path), "RUN_DIR": str(tmp_path), "RESUME": "none"}
    monkeypatch.setattr(compose.script, "job_environment", lambda name: own)
    with refused("SCRIPT, WORKDIR: /tmp is another folder in containers; move the script to a folder below it"):
        compose.script_spec("", [])


def test_modules_of_the_callers_own_are_seen_in_the_containers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = compose.recipe_spec("ddp", ["--model", "vit-tiny", "--data=digits", "--epochs", "2"])
    assert (own.environment, own.volumes) == ({}, [])
    (tmp_path / "mine.yaml").write_text("model: mine:net\n")
    given = (["--epochs", "2", "--model", "mine:net"], ["--data=mine:points"], ["--task", "mine:Fit"])
    for options in (*given, ["--optimizer", "mine:sgd"], ["--config", "mine.yaml"]):
        own = compose.recipe_spec("ddp", options)
        assert own.environment == {"PYTHONPATH": "/code"}
        [volume] = own.volumes
        assert volume == {"type": "bind", "source": str(tmp_path), "target": "/code", "read_only": True}


def test_folders_of_the_caller_become_those_of_the_container(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine/ddp-001").mkdir(parents=True)
    options = ["--runs-dir", "mine", "--epochs", "3", "--data-dir=/mnt/images"]
    own = compose.recipe_spec("ddp", options)
    assert own.options == [*options, "--name", "ddp-002", "--runs-dir", "/runs", "--data-dir", "/data"]
    assert (own.run, own.data) == (tmp_path / "mine/ddp-002", Path("/mnt/images"))
    assert compose.recipe_spec("probe", ["--device", "cpu"]).options == ["--device", "cpu"]
    for name in ("../mine", "/tmp", "a/b"):  # the containers' user would own that folder
        with refused(f"NAME expects a plain name, without folders, got {name!r}"):
            compose.recipe_spec("ddp", ["--name", name])


def test_a_cache_is_a_folder_of_this_machine(tmp_path, monkeypatch):
    """The containers' root is read-only, and their /tmp is in memory."""
    monkeypatch.chdir(tmp_path)
    options = ["--data-dir", "https://host/x", "--cache-dir", "kept", "--data", "shards"]
    volume = {"type": "bind", "source": str(tmp_path / "kept"), "target": "/cache"}
    own = compose.recipe_spec("ddp", options)
    kept = [*options, "--name", "ddp-001", "--runs-dir", "/runs"]
    assert own.options == [*kept, "--data-dir", "https://host/x", "--cache-dir", "/cache"]
    assert (own.cache, own.volumes) == (tmp_path / "kept", [volume])
    own = compose.recipe_spec("ddp", [*options, "--model", "mine:net"])
    assert [volume["target"] for volume in own.volumes] == ["/cache", "/code"]


def test_folders_of_a_config_file_become_those_of_the_container_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "mine.yaml"
    flags, remote = ["--config", "mine.yaml"], ["--data-dir", "https://host/x", "--cache-dir", "/cache"]
    config.write_text("data: shards\ndata_dir: https://host/x\ncache_dir: kept\n")
    own = compose.recipe_spec("ddp", flags)
    assert own.options == [*flags, "--name", "ddp-001", "--runs-dir", "/runs", *remote]
    assert (own.data, own.cache) == (tmp_path / "data", tmp_path / "kept")
    config.write_text("data_dir: images\nruns_dir: mine\nname: first\n")
    own = compose.recipe_spec("ddp", flags)
    assert own.options == [*flags, "--name", "first", "--runs-dir", "/runs", "--data-dir", "/data"]
    assert (own.data, own.run) == (tmp_path / "images", tmp_path / "mine/first")
    config.write_text("data: text\n")
    assert compose.recipe_spec("ddp", flags).options == [*flags, "--name", "ddp-002", "--runs-dir", "/runs"]
    assert compose.recipe_spec("ddp", [*flags, "--data", "digits"]).options[-2:] == ["--data-dir", "/data"]
    config.write_text("runs_dir: {}\ncache_dir: null\nname: true\ndata_dir: [a, b]\n")  # the recipe refuses these
    own = compose.recipe_spec("ddp", flags)
    assert (own.run, own.data, own.cache) == (tmp_path / "runs/ddp-004", tmp_path / "data", None)


def docker_that(folder, script):
    """Return a docker that runs a line of bash."""
    return str(write_program(folder / "docker.sh", f"#!/usr/bin/env bash\n{script}\n"))


def test_an_engine_that_does_not_answer_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compose, "ENGINE_TIMEOUT_S", 0.2)
    monkeypatch.setenv("DOCKER", docker_that(tmp_path, "exec sleep 60"))
    assert compose.main(["ddp", "--nodes", "2"]) == 2
    expected = "error: the Docker engine gave docker.sh info no answer within 0.2 s; restart it "
    assert capsys.readouterr().err == f"{expected}(systemctl restart docker)\n"


def test_an_image_of_other_code_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compose, "revision", lambda: f"{'a' * 40}-dirty")
    for inside, is_told in (("b" * 40, True), (f"{'a' * 40}-dirty", False)):
        compose.check_image(docker_that(tmp_path, f"echo {inside}"), "mine", "ddp")
        told = f"warning: mine holds revision {'b' * 12}, this checkout is {'a' * 12}-dirty; make image"
        assert capsys.readouterr().err.startswith(told) is is_told
    monkeypatch.setattr(compose, "revision", lambda: "a" * 40)
    compose.check_image(docker_that(tmp_path, f"echo {'a' * 40}-dirty"), "mine", "ddp")
    told = f"warning: mine holds revision {'a' * 12}-dirty, this checkout is {'a' * 12}; make image"
    assert capsys.readouterr().err.startswith(told)


def test_compose_is_that_of_docker_or_the_older_program(tmp_path, monkeypatch):
    docker, older = docker_that(tmp_path, '[[ $1 != compose ]] || { echo "no disk" >&2; exit 1; }'), "/bin/older"
    monkeypatch.setattr(compose.shutil, "which", {"docker-compose": older}.get)
    assert compose.find_compose(docker) == [older]
    assert compose.find_compose("true") == ["true", "compose"]
    monkeypatch.setattr(compose.shutil, "which", lambda name: None)
    with refused("Docker Compose not found; install its plugin"):
        compose.find_compose(docker)
    with refused("Compose could not make the containers: no disk"):
        compose.run_nodes(docker, [docker, "compose"], {}, 2, compose.LocalJob())
    trace = "Traceback (most recent call last):\\n  File\\nNo such socket\\n"
    older = docker_that(tmp_path, f"printf '{trace}' >&2; exit 1")
    said = "Compose could not make the containers: No such socket; DOCKER_HOST=unix:///path names the engine's"
    with refused(said):
        compose.run_nodes(docker, [older], {}, 2, compose.LocalJob())


def test_an_engine_and_an_image_that_are_missing_are_one_line(tmp_path):
    for script, said in (
        ("exit 1", f"no Docker engine answers {tmp_path}/docker.sh; start it "),
        ("[[ $1 == info ]]", "there is no image mine; make image RECIPE=ddp builds it"),
    ):
        with refused(said):
            compose.check_image(docker_that(tmp_path, script), "mine", "ddp")


def test_containers_that_are_not_removed_in_time_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compose, "ENGINE_TIMEOUT_S", 0.2)
    with compose.removed_at_end([docker_that(tmp_path, "exec sleep 1")], {"COMPOSE_PROJECT_NAME": "job-1"}):
        pass
    said = "warning: after 0.2 s Compose is still removing the containers of job-1; docker ps --all shows what is "
    assert capsys.readouterr().err == f"{said}left\n"


def test_containers_that_cannot_be_made_leave_no_run(tmp_path, monkeypatch, capsys):
    docker = docker_that(tmp_path, '[[ "$*" != *" up "* ]] || { echo "no disk" >&2; exit 1; }')
    monkeypatch.setenv("DOCKER", docker)
    assert compose.main(["ddp", "--nodes", "2", "--", f"--runs-dir={tmp_path}/runs"]) == 2
    assert capsys.readouterr().err.endswith("error: Compose could not make the containers: no disk\n")
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "status", "out", "err"),
    [("INT", 130, "", "interrupted\n"), ("TERM", 0, "stopped by SIGTERM\n", "")],
)
def test_a_signal_while_the_containers_are_made(tmp_path, number, status, out, err):
    """Compose gets it as well, and fails."""
    script = f'[[ "$*" != *" up "* ]] || {{ kill -{number} 0; sleep 60; }}'
    command = [sys.executable, "-m", "docker.compose", "ddp", "--nodes=2", "--", f"--runs-dir={tmp_path}/runs"]
    result = run_command(*command, DOCKER=docker_that(tmp_path, script))
    shown = re.sub("warning: .*\n", "", result.stderr)  # the image has no label of its revision
    assert (result.status, result.stdout, shown) == (status, out, err)
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DOCKER", docker_that(tmp_path, "true"))
    (tmp_path / "file").touch()
    assert compose.main(["ddp", "--nodes", "2", "--", "--name=a", f"--runs-dir={tmp_path}/file"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: cannot make {tmp_path}/file")


def test_an_elastic_job_is_refused(capsys):
    for word in ("--min-nodes=2", "--max-restarts=3", "--max-restarts=0"):
        assert compose.main(["ddp", "--nodes", "3", word]) == 2
        assert capsys.readouterr().err.startswith("error: MIN_NODES: WITH=docker does not restart lost contain")

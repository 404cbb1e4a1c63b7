#!/usr/bin/env bash
# Build or push the image that holds a recipe, by docker/Dockerfile.
#
#   docker/image.sh build ddp
#   BASE_IMAGE=ubuntu:24.04 docker/image.sh build horovod          an image for machines without GPUs
#   EFA_INSTALLER=1.43.2 EFA_SHA256=... docker/image.sh build ddp   for AWS: with libfabric and aws-ofi-nccl
#   TORCH_INDEX=https://download.pytorch.org/whl/cu128 docker/image.sh build ddp   by requirements/run-cu128.txt (make lock)
#   REGISTRY=registry.example.com/team TAG=1 docker/image.sh push ddp
#   docker/image.sh lock            base images by digest: docker/images.lock, which build reads where BASE_IMAGE is not set
#   ATTEST=1 REGISTRY=registry.example.com/team docker/image.sh build ddp   build and push, with SBOM and provenance
#
# The last line of a success: `image: NAME:TAG, 6612 MB, revision ...`. TAG is latest by default; BUILD_IMAGE,
# which compiles, is BASE_IMAGE if that is set.
# What goes in is listed in .dockerignore.
set -euo pipefail

CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.."

refuse() {
    echo "error: $1" >&2
    exit 2
}

action=${1:-} recipe=${2:-}
locked=docker/images.lock
if [[ $action == lock ]]; then
    docker=$(command -v "${DOCKER:-docker}") || refuse "docker not found; install Docker with buildx, or set DOCKER"
    lines=()
    while read -r variable image; do
        digest=$("$docker" buildx imagetools inspect --format '{{.Manifest.Digest}}' "$image") ||
            refuse "the registry gave no digest of $image; its error is above (docker buildx is needed)"
        [[ $digest =~ ^sha256:[0-9a-f]{64}$ ]] || refuse "no digest of $image: buildx says '$digest'"
        lines+=("$variable=$image@$digest")
    done < <(sed -nE 's/^ARG ((BASE|BUILD)_IMAGE)=(\S+)$/\1 \3/p' docker/Dockerfile)
    printf '%s\n' "${lines[@]}" | tee "$locked"
    exit
fi
[[ $action == build || $action == push ]] || refuse "usage: docker/image.sh build|push RECIPE"
[[ $recipe =~ ^[[:lower:][:digit:]_]+$ && -f recipes/$recipe/train.py ]] || refuse "there is no recipe '$recipe'; make list shows all"
docker=$(command -v "${DOCKER:-docker}") || refuse "docker not found; install Docker (Debian: docker.io), or set DOCKER"
timeout 60 "$docker" info >/dev/null 2>&1 ||
    refuse "no Docker engine answers $docker; start it (systemctl start docker), or join the group docker"

image=ddp # for all recipes without an image of their own
if grep -qx "FROM base AS $recipe" docker/Dockerfile; then image=$recipe; fi
name=${REGISTRY:+${REGISTRY%/}/}cluster-recipes/$image:${TAG:-latest}

if [[ $action == push ]]; then
    [[ -n ${REGISTRY:-} ]] || refuse "push needs a registry: REGISTRY=registry.example.com/team"
    "$docker" image inspect "$name" >/dev/null 2>&1 ||
        refuse "there is no image $name; make image RECIPE=$recipe REGISTRY=$REGISTRY${TAG:+ TAG=$TAG} builds it"
    exec "$docker" push "$name"
fi
if [[ ${ATTEST:-} == 0 ]]; then ATTEST=; fi
# Attestations are pushed with the image: the engine's own store and builder cannot hold them.
if [[ -n ${ATTEST:-} ]]; then
    driver=$("$docker" buildx inspect 2>/dev/null | awk '$1 == "Driver:" { print $2 }') || driver=
    [[ -n $driver && $driver != docker ]] ||
        refuse "ATTEST needs a builder with a container: docker buildx create --use --driver docker-container"
    [[ -n ${REGISTRY:-} ]] || refuse "ATTEST pushes the image: REGISTRY=registry.example.com/team"
fi

revision=$({ git ls-files --error-unmatch docker/image.sh >/dev/null && git describe --always --dirty --abbrev=40; } 2>/dev/null ||
    echo unknown) # an archive may be within another repository
arguments=(--build-arg "RECIPE=$image" --build-arg "REVISION=$revision")
if [[ -z ${BASE_IMAGE:-} && -z ${TORCH_INDEX:-} && -f $locked ]]; then
    for variable in BASE_IMAGE BUILD_IMAGE; do
        if [[ -n ${!variable:-} ]]; then continue; fi
        image_name=$(sed -n "s/^ARG $variable=//p" docker/Dockerfile) pinned=$(sed -n "s/^$variable=//p" "$locked")
        [[ $pinned == "$image_name@"* && ${pinned#*@} =~ ^sha256:[0-9a-f]{64}$ ]] ||
            refuse "$locked has no digest of the $variable of docker/Dockerfile, $image_name; make image-lock writes it again"
        printf -v "$variable" %s "$pinned"
    done
fi
if [[ -n ${BASE_IMAGE:-} ]]; then
    arguments+=(--build-arg "BASE_IMAGE=$BASE_IMAGE")
    BUILD_IMAGE=${BUILD_IMAGE:-$BASE_IMAGE}
fi
if [[ -n ${EFA_INSTALLER:-} ]]; then
    [[ ${EFA_SHA256:-} =~ ^[0-9a-f]{64}$ ]] ||
        refuse "EFA_INSTALLER without the SHA-256 of aws-efa-installer-$EFA_INSTALLER.tar.gz; EFA_SHA256=..., from sha256sum"
    arguments+=(--build-arg "EFA_INSTALLER=$EFA_INSTALLER" --build-arg "EFA_SHA256=$EFA_SHA256")
fi
if [[ -n ${APT_SNAPSHOT:-} ]]; then arguments+=(--build-arg "APT_SNAPSHOT=$APT_SNAPSHOT"); fi
if [[ -n ${TORCH_INDEX:-} ]]; then
    [[ -n ${BASE_IMAGE:-} ]] ||
        refuse "TORCH_INDEX needs a base without CUDA 13, such as BASE_IMAGE=ubuntu:24.04"
    lock=run-${TORCH_INDEX##*/}.txt
    [[ -f requirements/$lock ]] ||
        refuse "there is no requirements/$lock; make lock TORCH_INDEX=$TORCH_INDEX TORCH=\"torch==... torchvision==...\" makes it"
    arguments+=(--build-arg "TORCH_INDEX=$TORCH_INDEX" --build-arg "LOCK=$lock")
fi
# ddp's has nothing to compile.
if [[ -n ${BUILD_IMAGE:-} && $image != ddp ]]; then arguments+=(--build-arg "BUILD_IMAGE=$BUILD_IMAGE"); fi
if [[ $image == horovod ]]; then
    trap 'rm -rf docker/wheels' EXIT
    wheels=${XDG_CACHE_HOME:-${HOME:-~}/.cache}/cluster-recipes
    if [[ -d $wheels ]]; then mkdir -p docker/wheels && cp -r "$wheels" docker/wheels; fi
fi
echo "image: building $name (PyTorch with CUDA: about 6 GB, some minutes)"
# docker/slurm.Dockerfile builds on this name: what is not there would be pulled, and nobody can own one below .invalid.
if [[ -z ${REGISTRY:-} ]]; then arguments+=(--tag "registry.invalid/$name"); fi
arguments+=(--progress=plain --file docker/Dockerfile --tag "$name" .)
failed="the build failed; its last lines are above (no base image: BASE_IMAGE=ubuntu:24.04, or docker/stand-in.sh)"
if [[ -n ${ATTEST:-} ]]; then
    "$docker" buildx build --push --sbom=true --provenance=mode=max "${arguments[@]}" || refuse "$failed"
    echo "image: $name pushed with SBOM and provenance, revision $revision"
    exit
fi
# BUILDAH_FORMAT: else podman ignores the Dockerfile's SHELL.
DOCKER_BUILDKIT=1 BUILDAH_FORMAT=docker "$docker" build "${arguments[@]}" || refuse "$failed"
if [[ ${BASE_IMAGE:-} != *@sha256:* ]]; then echo "image: its base is named by a tag, which can move (make image-lock)"; fi
echo "image: no SBOM and no provenance was made (ATTEST=1)"
echo "image: $name, $(($("$docker" image inspect --format '{{.Size}}' "$name") / 1000000)) MB, revision $revision"

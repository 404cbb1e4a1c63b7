#!/usr/bin/env bash
# Build or push the image that holds a recipe, by docker/*.Dockerfile.
#
#   docker/image.sh build ddp
#   BASE_IMAGE=ubuntu:24.04 docker/image.sh build horovod          an image for machines without GPUs
#   EFA_INSTALLER=1.43.2 EFA_SHA256=... docker/image.sh build ddp   for AWS: with libfabric and aws-ofi-nccl
#   REGISTRY=registry.example.com/team TAG=1 docker/image.sh push ddp
#
# The last line of a success: `image: NAME:TAG, 6612 MB, revision ...`. TAG is latest where it is not set; BUILD_IMAGE,
# which compiles, is BASE_IMAGE where that is set.
# What goes in is listed in .dockerignore.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

refuse() {
    echo "error: $1" >&2
    exit 2
}

action=${1:-} recipe=${2:-}
[[ $action == build || $action == push ]] || refuse "usage: docker/image.sh build|push RECIPE"
[[ $recipe =~ ^[a-z0-9_]+$ && -f recipes/$recipe/train.py ]] || refuse "there is no recipe '$recipe'; make list shows all"
docker=$(command -v "${DOCKER:-docker}") || refuse "there is no docker; install Docker (Debian: docker.io), or set DOCKER"
"$docker" info >/dev/null 2>&1 ||
    refuse "no Docker engine answers $docker; start it (systemctl start docker), or join the group docker"

image=ddp # holds all recipes that need neither Horovod nor apex
if [[ -f docker/$recipe.Dockerfile ]]; then image=$recipe; fi
name=${REGISTRY:+${REGISTRY%/}/}cluster-recipes/$image:${TAG:-latest}

if [[ $action == push ]]; then
    [[ -n ${REGISTRY:-} ]] || refuse "push needs a registry: REGISTRY=registry.example.com/team"
    "$docker" image inspect "$name" >/dev/null 2>&1 ||
        refuse "there is no image $name; make image RECIPE=$recipe REGISTRY=$REGISTRY${TAG:+ TAG=$TAG} builds it"
    exec "$docker" push "$name"
fi

revision=$(git describe --always --dirty --abbrev=40 2>/dev/null || echo unknown)
arguments=(--build-arg "REVISION=$revision")
if [[ -n ${BASE_IMAGE:-} ]]; then
    arguments+=(--build-arg "BASE_IMAGE=$BASE_IMAGE")
    BUILD_IMAGE=${BUILD_IMAGE:-$BASE_IMAGE}
fi
if [[ -n ${EFA_INSTALLER:-} ]]; then
    [[ ${EFA_SHA256:-} =~ ^[0-9a-f]{64}$ ]] ||
        refuse "EFA_INSTALLER without the SHA-256 of aws-efa-installer-$EFA_INSTALLER.tar.gz; EFA_SHA256=..., from sha256sum"
    arguments+=(--build-arg "EFA_INSTALLER=$EFA_INSTALLER" --build-arg "EFA_SHA256=$EFA_SHA256")
fi
# ddp's has nothing to compile.
if [[ -n ${BUILD_IMAGE:-} && $image != ddp ]]; then arguments+=(--build-arg "BUILD_IMAGE=$BUILD_IMAGE"); fi
if [[ $image == horovod ]]; then
    trap 'rm -rf docker/wheels' EXIT
    wheels=${XDG_CACHE_HOME:-$HOME/.cache}/cluster-recipes
    if [[ -d $wheels ]]; then mkdir -p docker/wheels && cp -r "$wheels" docker/wheels; fi
fi
echo "image: building $name of docker/$image.Dockerfile (PyTorch with CUDA: about 6 GB, some minutes)"
DOCKER_BUILDKIT=1 "$docker" build --progress=plain --file "docker/$image.Dockerfile" --tag "$name" "${arguments[@]}" . ||
    refuse "the build failed; its last lines are above (no base image: BASE_IMAGE=ubuntu:24.04, or docker/stand-in.sh)"
echo "image: $name, $(($("$docker" image inspect --format '{{.Size}}' "$name") / 1000000)) MB, revision $revision"

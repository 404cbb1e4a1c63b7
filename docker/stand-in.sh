#!/usr/bin/env bash
# Make a base image from Debian's packages, for machines that reach a package registry but no image registry.
#
#   docker/stand-in.sh [TAG]                                        default: cluster-recipes/stand-in
#   make image RECIPE=ddp BASE_IMAGE=cluster-recipes/stand-in
#
# It replaces nvidia/cuda: docker/Dockerfile builds on it unchanged, without the CUDA toolkit. The tests use it.
# It includes this machine's certificate authorities, so that pip reaches its registry through a company's proxy.
# Needs root, debootstrap, Debian's keys (debian-archive-keyring) and a Docker engine. MIRROR names another mirror of Debian.
set -euo pipefail

tag=${1:-cluster-recipes/stand-in}
suite=bookworm

refuse() {
    echo "error: $1" >&2
    exit 2
}
[[ $(id -u) == 0 ]] || refuse "debootstrap needs root: sudo docker/stand-in.sh"
command -v debootstrap >/dev/null || refuse "debootstrap not found; apt-get install debootstrap debian-archive-keyring"
docker=$(command -v "${DOCKER:-docker}") || refuse "docker not found; apt-get install docker.io"
timeout 60 "$docker" info >/dev/null 2>&1 || refuse "no Docker engine answers: start dockerd"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Without Debian's keys, debootstrap would only warn, and run what a mirror sends as root.
debootstrap --force-check-gpg --variant=minbase --include=ca-certificates "$suite" "$work/root" ${MIRROR:+"$MIRROR"} \
    >"$work/log" 2>&1 ||
    { tail -n 5 "$work/log" >&2 && refuse "debootstrap failed; its last lines are above"; }
cp -r /usr/local/share/ca-certificates/. "$work/root/usr/local/share/ca-certificates/"
chroot "$work/root" update-ca-certificates >/dev/null 2>&1
rm -rf "$work"/root/var/cache/apt/archives/*.deb
certificates=/etc/ssl/certs/ca-certificates.crt
# One variable each: podman takes all of a line for the first one's value.
tar -C "$work/root" -c . |
    "$docker" import --change "ENV PIP_CERT=$certificates" --change "ENV SSL_CERT_FILE=$certificates" - "$tag" >/dev/null
echo "stand-in: $tag, $(("$("$docker" image inspect --format '{{.Size}}' "$tag")" / 1000000)) MB"

#!/usr/bin/env bash
# Let apt take a distribution's packages from a snapshot of its archive, so that a build gets the same ones again.
#
#   docker/apt-snapshot.sh http://snapshot.debian.org/archive/debian/20261101T000000Z [ROOT]
#   docker/apt-snapshot.sh https://snapshot.ubuntu.com/ubuntu/20261101T000000Z
#
# docker/Dockerfile calls it with APT_SNAPSHOT; with none it does nothing. Other sources, such as NVIDIA's, stay as they are,
# and are named.
set -euo pipefail

url=${1:-}
etc=${2:-}/etc/apt
if [[ -z $url ]]; then exit; fi
if [[ ! $url =~ ^https?://[[:alnum:]./:-]+/(debian|ubuntu)/[0-9]{8}T[0-9]{6}Z$ ]]; then
    echo "error: APT_SNAPSHOT '$url' is not a snapshot; use one such as http://snapshot.debian.org/archive/debian/20261101T000000Z" >&2
    exit 2
fi
if [[ ${BASH_REMATCH[1]} == debian ]]; then
    security=${url/\/debian\//\/debian-security\/}
    edits=(-e "s#https?://(deb|security)\.debian\.org/debian-security/?#$security#"
        -e "s#https?://(deb|ftp[a-z.]*)\.debian\.org/debian/?( |\$)#$url\2#")
else
    security=$url
    edits=(-e "s#https?://([a-z.]*archive|security)\.ubuntu\.com/ubuntu/?#$url#"
        -e "s#https?://ports\.ubuntu\.com/ubuntu-ports/?#$url#")
fi
mapfile -t files < <(find "$etc" -name '*.list' -o -name '*.sources')
if ((${#files[@]})); then sed -Ei "${edits[@]}" "${files[@]}"; fi
bare=${url#*://} # a source may have the other of http and https, and a slash at its end
if ! grep -qsF "$bare" "${files[@]}" /dev/null; then
    echo "error: APT_SNAPSHOT '$url': no source in $etc is of that distribution's archive; name a snapshot of the base image's distribution" >&2
    exit 2
fi
sed -E '/^ *#/d' "${files[@]}" | { grep -oE 'https?://[^][:space:]]+' || true; } | sort -u | while read -r source; do
    here=${source#*://} here=${here%/}
    if [[ $here != "$bare" && $here != "${security#*://}" ]]; then
        echo "$source is not a snapshot; its packages are today's" >&2
    fi
done
mkdir -p "$etc/apt.conf.d"
echo 'Acquire::Check-Valid-Until "false";' >"$etc/apt.conf.d/50snapshot" # a snapshot's lists have run out

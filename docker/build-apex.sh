#!/usr/bin/env bash
# Build a wheel of NVIDIA apex 25.05 with its CUDA extensions into a folder; docker/Dockerfile calls it.
#
#   PYTHON=/opt/venv/bin/python docker/build-apex.sh /wheels
#
# Without nvcc it leaves the folder empty and says so: apex.amp works only on GPUs, and its setup.py needs nvcc.
# APEX_REPOSITORY names a mirror; CUDA_ARCHS the GPUs to compile for; PYTHONPATH has setuptools, wheel and ninja.
set -euo pipefail

TAG=25.05
COMMIT=379937e1719b8190f38f3e666e2a8d32c97e221f

wheels=${1:?usage: docker/build-apex.sh FOLDER}
mkdir -p "$wheels"
if ! command -v nvcc >/dev/null; then
    echo "apex: left out, because there is no nvcc in this image; the recipe runs on torch.amp"
    exit
fi

source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
git -c advice.detachedHead=false clone --quiet --depth 1 --branch "$TAG" \
    "${APEX_REPOSITORY:-https://github.com/NVIDIA/apex.git}" "$source"
if [[ $(git -C "$source" rev-parse HEAD) != "$COMMIT" ]]; then
    echo "error: tag $TAG is not the known commit $COMMIT" >&2
    exit 2
fi
cd "$source"
# One extension is compiled for GPUs of its own list, whose first (7.0) CUDA 13 no longer knows.
sed -i '/cc_flag.append("-gencode")/{N;/compute_70/d}' setup.py
TORCH_CUDA_ARCH_LIST=${CUDA_ARCHS:-8.0;9.0;10.0} \
    "${PYTHON:-python3}" setup.py --quiet --cpp_ext --cuda_ext bdist_wheel --dist-dir "$wheels"
echo "apex: $(ls "$wheels")"

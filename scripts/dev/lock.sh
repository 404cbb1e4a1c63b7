#!/usr/bin/env bash
# Resolve requirements/*.in into requirements/*.txt: exact versions with hashes, for every platform at once.
#
#   make lock
#   make lock TORCH_INDEX=https://download.pytorch.org/whl/cu128 TORCH="torch==2.11.0 torchvision==0.26.0"
#
# The second writes only requirements/run-cu128.txt, for x86-64 Linux with an older driver: torch of that CUDA, from
# PyTorch's own index. No such lock is kept, or has been made or run by any test.
set -euo pipefail

CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/../../requirements"
if [[ -n ${TORCH_INDEX:-} ]]; then
    cuda=${TORCH_INDEX##*/}
    if [[ ! $cuda =~ ^cu12[0-9]$ || ! ${TORCH:-} =~ ^torch==[0-9.]+\ torchvision==[0-9.]+$ ]]; then
        echo 'error: TORCH_INDEX ends with cu12x, and TORCH names its versions: TORCH="torch==2.11.0 torchvision==0.26.0"' >&2
        exit 2
    fi
    {
        sed '/^torch/d; s/-cu13/-cu12/' run.in
        for package in $TORCH; do echo "$package+$cuda"; done
    } | uv pip compile --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes \
        --extra-index-url "$TORCH_INDEX" --index-strategy unsafe-best-match --no-emit-index-url \
        --custom-compile-command "make lock TORCH_INDEX=$TORCH_INDEX" --output-file "run-$cuda.txt" -
    exit
fi
for name in run dev bench horovod-build; do
    options=(--upgrade)
    case $name in # one environment may hold all three
        dev) options+=(--constraints run.txt) ;;
        bench) options+=(--constraints run.txt --constraints dev.txt) ;;
    esac
    uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
        --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" \
        "${options[@]}" --output-file "$name.txt" "$name.in"
done

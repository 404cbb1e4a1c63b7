#!/usr/bin/env bash
# Resolve requirements/*.in into requirements/*.txt: exact versions with hashes, for every platform at once.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../requirements"
for name in run dev horovod-build; do
    constraint=()
    if [[ $name == dev ]]; then constraint=(--constraints run.txt); fi
    uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
        --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" \
        "${constraint[@]}" --output-file "$name.txt" "$name.in"
done

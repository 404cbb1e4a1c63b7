#!/usr/bin/env bash
# Resolve requirements/*.in into requirements/*.txt: exact versions with hashes, for every platform at once.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../requirements"
for name in run dev bench horovod-build; do
    constraint=()
    case $name in # one environment may hold all three
        dev) constraint=(--constraints run.txt) ;;
        bench) constraint=(--constraints run.txt --constraints dev.txt) ;;
    esac
    uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
        --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" \
        "${constraint[@]}" --output-file "$name.txt" "$name.in"
done

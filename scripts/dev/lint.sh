#!/usr/bin/env bash
# Check formatting, names, types, shell scripts and YAML with the tools of .venv.
set -euo pipefail

CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PATH=$PWD/.venv/bin:$PATH

ruff format --check .
ruff check .
mypy
git ls-files -z --cached --others --exclude-standard '*.sh' '*.sbatch' .ci/run | xargs -0 shellcheck
yamllint --strict .
check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
hadolint docker/*Dockerfile

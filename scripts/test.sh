#!/usr/bin/env bash
# Run the tests and print how much of recipes/ and scripts/ they have run, in all processes: ranks, agents, launchers.
#
#   scripts/test.sh [PYTEST ARGUMENTS]
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}

"$python" -m coverage erase
status=0
"$python" -m coverage run -m pytest "$@" || status=$?
find . -maxdepth 1 -name '.coverage.*' -size 0 -delete # of processes that were killed
"$python" -m coverage combine --quiet --append || true # where coverage has not done so itself
"$python" -m coverage report
exit "$status"

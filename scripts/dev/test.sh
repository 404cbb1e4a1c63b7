#!/usr/bin/env bash
# Run the tests; with COVERAGE=1 also print how much of the code they have run, in all processes: ranks, agents, ...
# With ONCE=FILE, leave out the tests that have passed in earlier runs with the same FILE.
#
#   scripts/dev/test.sh quick [PYTEST ARGUMENTS]   all but those marked slow: minutes
#   scripts/dev/test.sh all [PYTEST ARGUMENTS]     all, e.g. tests/unit --numprocesses 0
#
# Four workers, also on two cores: tests wait for processes to start or to end most of the time. Coverage takes a
# quarter longer.
set -euo pipefail

CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/../.."
tier=${1:-}
case $tier in
quick) chosen=(-m "not slow") ;;
all) chosen=() ;;
*)
    echo "error: unknown tier '$tier'; usage: scripts/dev/test.sh quick|all [PYTEST ARGUMENTS]" >&2
    exit 2
    ;;
esac
shift
python=${PYTHON:-.venv/bin/python}
# Else each worker compiles all tests at each run, 5 s of a core, and each process what it imports.
unset PYTHONDONTWRITEBYTECODE
tests=(pytest --numprocesses 4 --dist worksteal ${ONCE:+"--once=$ONCE"} ${chosen[@]+"${chosen[@]}"} "$@")
unset ONCE # a test may start these, too

if [[ -z ${COVERAGE:-} ]]; then exec "$python" -m "${tests[@]}"; fi

"$python" -m coverage erase
status=0
"$python" -m coverage run -m "${tests[@]}" || status=$?
# A process that was killed while it wrote its figures leaves a file that cannot be read, and a warning about it.
"$python" -m coverage combine --quiet --append &>/dev/null || true
rm -f .coverage.*
"$python" -m coverage report
exit "$status"

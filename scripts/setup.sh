#!/usr/bin/env bash
# Create .venv with the exact packages of requirements/: once, and again when the list has changed.
#
#   scripts/setup.sh run       what recipes need
#   scripts/setup.sh dev       that, and what tests and checks need
#   scripts/setup.sh bench     that of run, and the peers that make bench measures
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
want=${1:?usage: scripts/setup.sh run|dev|bench}

# .venv/.installed/ has a copy of each list that the environment holds. dev's and bench's hold everything that run's
# does, in the same versions.
is_ready() { cmp --silent ".venv/.installed/$want.txt" "requirements/$want.txt"; }
is_ready && exit 0

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "error: $python is missing or older than Python 3.11; install it, or name one: PYTHON=python3.12 make ..." >&2
    exit 2
fi
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    echo "error: $python cannot make virtual environments; install its venv package (Debian: python3-venv)" >&2
    exit 2
fi

# Two calls at once: the second waits for the first and finds everything in place.
exec 9>.venv.lock
"$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
is_ready && exit 0

echo "setup: installing requirements/$want.txt into .venv (PyTorch with CUDA: about 5 GB, some minutes)" >&2
[[ -x .venv/bin/python ]] || "$python" -m venv --clear .venv
[[ -f .venv/.installed ]] && rm .venv/.installed # of an older version of this script
rm -f ".venv/.installed/$want.txt"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! .venv/bin/python -m pip install --disable-pip-version-check --require-hashes \
    --requirement "requirements/$want.txt" >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "error: pip could not install requirements/$want.txt; its last words are above" >&2
    exit 2
fi
mkdir -p .venv/.installed
cp requirements/run.txt "requirements/$want.txt" .venv/.installed/

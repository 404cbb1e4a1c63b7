#!/usr/bin/env bash
# Create .venv with the exact packages of requirements/: once, and again when the list has changed.
#
#   scripts/dev/setup.sh run       what recipes need
#   scripts/dev/setup.sh dev       the same, and what tests and checks need
#   scripts/dev/setup.sh bench     what recipes need, and the peers that make bench measures
#
# Prints large downloads and the end; pip's output is in .venv/setup.log. PYTHON names the Python to make it with.
set -euo pipefail

CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/../.."
want=${1:-}
unset PYTHONHOME # as venv's own activate does
# Let packages go to .venv and nowhere else. (--target= below and PIP_USER=0 override a pip.conf.) A constraint, as
# NVIDIA's images of PyTorch set, would contradict requirements/.
unset PIP_TARGET PIP_PREFIX PIP_ROOT PIP_PYTHON PIP_CONSTRAINT PIP_BUILD_CONSTRAINT
export PIP_USER=0
if [[ ! $want =~ ^(run|dev|bench)$ ]]; then
    echo "usage: scripts/dev/setup.sh run|dev|bench" >&2
    exit 2
fi

# .venv/.installed/ has a copy of each list that the environment holds. dev's and bench's hold everything that run's
# does, in the same versions.
is_ready() { runs && holds "$want"; }
# Without cmp, which minimal systems lack.
holds() { [[ -f .venv/.installed/$1.txt && $(<".venv/.installed/$1.txt") == "$(<"requirements/$1.txt")" ]]; }
# Whether .venv's Python starts, is supported, and is the one whose packages .venv has: an upgrade may replace it.
runs() {
    .venv/bin/python -I -S -c 'import os, sys
packages = os.path.join(".venv/lib", os.path.basename(os.path.dirname(os.__file__)))
sys.exit(not (3, 11) <= sys.version_info < (3, 15) or not os.path.isdir(packages))' &>/dev/null
}
is_ready && exit 0

python=$(scripts/dev/python.sh -c 'import sys; print(sys.executable)') || exit
if "$python" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 15))'; then
    fix="name an older one: PYTHON=python3.14 make setup"
    echo "error: $python is $("$python" -V), for which requirements/ has no torch yet; $fix" >&2
    exit 2
fi
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    echo "error: $python cannot make virtual environments; install its venv package (Debian: python3-venv)" >&2
    exit 2
fi

say() { echo "setup: $*" >&2; }

# pip and compileall end at Ctrl-C with the status of a failure. Nothing in .venv/.installed says that they are done.
trap 'trap - INT; kill -INT $$' INT

# Two calls at once: the second waits for the first and finds everything in place.
if ! { true >>.venv.lock; } 2>/dev/null; then
    echo "error: user $(id -u) cannot write $PWD/.venv.lock, and .venv is to be made beside it; use a copy of your own" >&2
    exit 2
fi
exec 9>.venv.lock
lock() { "$python" -c "import fcntl, sys
try: fcntl.flock(9, fcntl.LOCK_EX | $1)
except OSError as error: sys.exit(2 if isinstance(error, BlockingIOError) else 1)"; }
status=0
lock fcntl.LOCK_NB || status=$?
if ((status == 2)); then
    say "waiting for another set-up of .venv"
    status=0
    lock 0 2>/dev/null || status=$? # at Ctrl-C, Python's traceback
fi
if ((status != 0)); then # Lustre without flock
    echo "warning: cannot lock .venv.lock on this file system: let no other set-up run at the same time" >&2
fi
is_ready && exit 0

# Show pip's progress in a few lines: each download of 50 MB or more, every 20th package, the start of unpacking.
show_progress() {
    local line words count=0
    while IFS= read -r line; do
        read -ra words <<<"$line"
        if [[ $line =~ ([^/ ]+)\ \(([5-9][0-9]|[0-9]{3,})(\.[0-9]+)?\ MB\)$ ]]; then
            say "${words[0]} ${BASH_REMATCH[1]} (${BASH_REMATCH[2]} MB)"
        elif [[ $line == "Collecting "* || $line == "Processing "* ]]; then
            count=$((count + 1))
            if ((count % 20 == 0)); then say "$count packages"; fi
        elif [[ $line == "Installing collected packages: "* ]]; then
            say "unpacking $((${#words[@]} - 3)) packages"
        fi
    done
}

log=.venv/setup.log
# An interrupted set-up may have left a Python without a whole pip.
if ! runs || ! { .venv/bin/python -m pip --version || .venv/bin/python -m ensurepip; } &>/dev/null; then
    "$python" -m venv --clear .venv >&2 || {
        echo "error: $python could not make $PWD/.venv; its reason is above" >&2
        exit 2
    }
fi
free=$(df -Pk .venv 2>/dev/null | awk 'NR == 2 { print int($4 / 1e6) }') || free="?"
size="PyTorch with CUDA: about 6 GB of the $free GB that are free, some minutes"
if holds run; then size="only what is missing"; fi
say "installing requirements/$want.txt into .venv ($size); log: $log"
rm -f ".venv/.installed/$want.txt"
if ! .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off --require-hashes \
    --target= --no-compile --requirement "requirements/$want.txt" 2>&1 | tee "$log" | show_progress; then
    tail -n 20 "$log" >&2
    echo "error: pip could not install requirements/$want.txt; its last lines are above, all of them in $log" >&2
    exit 2
fi
# As pip would, but on all cores; templates among the packages are no Python.
.venv/bin/python -m compileall -q -j 0 .venv/lib >>"$log" 2>&1 || true
mkdir -p .venv/.installed
for list in run "$want"; do cp "requirements/$list.txt" .venv/.installed/; done
say "done"

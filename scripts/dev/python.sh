#!/usr/bin/env bash
# Become Python 3.11 or later in this repository's folder: .venv's, else the host's.
#
#   scripts/dev/python.sh -m scripts.launch.local --list
#
# For programs that need no package: .venv may not exist yet. PYTHON names another interpreter.
set -euo pipefail

CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/../.."
unset PYTHONHOME PYTHONSAFEPATH # they are for another Python, and hide the modules of this folder
# Open the standard streams that the caller has closed, as daemons do: else the next file would get what is printed.
for fd in 0 1 2; do [[ ! -d /dev/fd || -e /dev/fd/$fd ]] || eval "exec $fd<>/dev/null"; done
pythons=(.venv/bin/python python3 python3.14 python3.13 python3.12 python3.11)
if [[ -n ${PYTHON:-} ]]; then pythons=("$PYTHON"); fi
for python in "${pythons[@]}"; do
    if reason=$("$python" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>&1); then exec "$python" "$@"; fi
done
if [[ -n ${PYTHON:-} && -n $reason ]] && command -v "$PYTHON" >/dev/null; then # it finds no libpython
    echo "error: $PYTHON does not start: ${reason//$'\n'/ }; load its module, or name another one: PYTHON=python3.12 make ..." >&2
    exit 2
fi
echo "error: ${PYTHON:-python3} is missing or older than Python 3.11; install it, or name one: PYTHON=python3.12 make ..." >&2
exit 2

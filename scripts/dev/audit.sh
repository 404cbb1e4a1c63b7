#!/usr/bin/env bash
# Ask PyPI's advisory database about every locked package: known vulnerabilities fail, and so do packages unknown to it.
#
#   scripts/dev/audit.sh
#
# It needs pypi.org itself: a mirror of packages answers no such questions. A package of requirements/*.txt that has a
# known vulnerability is named with the version that fixes it: `make lock` takes the newest versions.
set -euo pipefail

CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/../.."
uv=(.venv/bin/uv tool run --quiet --from pip-audit==2.10.1 pip-audit)

status=0
for list in run dev bench horovod-build; do
    echo "audit: requirements/$list.txt"
    "${uv[@]}" --strict --require-hashes --disable-pip --progress-spinner off --timeout 15 \
        --requirement "requirements/$list.txt" || status=1
done
exit "$status"

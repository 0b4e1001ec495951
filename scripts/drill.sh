#!/usr/bin/env bash
# Breaks small runs on purpose and prints how soon each was noticed, named and healed:
# bash scripts/drill.sh [--full] [--json FILE] [--keep DIR]    (about 15 s a row; --full takes an hour)
# --only kill:save:1 does one row.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$VENV/bin/python" -m scripts.drill "$@"

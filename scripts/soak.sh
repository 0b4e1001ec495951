#!/usr/bin/env bash
# One long run with hundreds of random faults, restarted by the supervisor, held against a run in
# peace: bash scripts/soak.sh [--faults N] [--seed S] [--ranks R] [--keep DIR]   (about 8 s a fault)
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$VENV/bin/python" -m scripts.soak "$@"

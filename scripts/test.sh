#!/usr/bin/env bash
# Sets up and runs the tests: bash scripts/test.sh [pytest arguments]; --full for the whole matrix.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$VENV/bin/python" -m pytest "$@"

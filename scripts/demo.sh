#!/usr/bin/env bash
# Sets up and shows the promise in under a minute: a run is poisoned and loses a rank, another is
# told to skip what the first skipped, and both must end with the same state: bash scripts/demo.sh
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$VENV/bin/python" -m runner demo "$@"

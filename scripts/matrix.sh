#!/usr/bin/env bash
# The default tests on the oldest, the locked and the newest releases of torch and of each dependency,
# each in a virtual environment of its own: bash scripts/matrix.sh [--leg NAME] [--folder DIR] [-- PYTEST ARGUMENTS]
# Brings some gigabytes a leg. Keeps docs/records/matrix.json: what ran, with which versions, and the counts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-python3}" -m scripts.matrix "$@"

#!/usr/bin/env bash
# On a machine with GPUs: tries every claim that only GPUs can show, and writes a JSON to send back.
# bash scripts/gpu_check.sh [--out FILE] [--ranks N] [--only NAME] [--minutes M]    (two GPUs or more; 14 minutes)
# Without a GPU it says so and ends with 2; --rehearse goes through the same lines on the CPU.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$VENV/bin/python" -m scripts.gpu_check "$@"

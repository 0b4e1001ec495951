#!/usr/bin/env bash
# Format, lint, types, import contracts.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export PATH="$VENV/bin:$PATH"
ruff format --check .
ruff check .
mypy
lint-imports
python -m scripts.size --check
python -m tests.full --old
bash -n scripts/*.sh launch/*.sh launch/slurm.sbatch .ci/run

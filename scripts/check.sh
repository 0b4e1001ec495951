#!/usr/bin/env bash
# Format, lint, types, import contracts.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export PATH="$VENV/bin:$PATH"
ruff format --check .
ruff check .
ruff check -q --preview --config 'lint.pydocstyle.convention="google"' --select D415,DOC102 runner  # docstrings
mypy
lint-imports
python -m scripts.size --check
python -m tests.full --old
bash -n scripts/*.sh launch/*.sh launch/slurm.sbatch .ci/run

#!/usr/bin/env bash
# Sets up and measures what the runner costs: bash scripts/bench.sh [--quick] [--only NAME] [--out FILE]
# Prints a Markdown table and writes JSON; --help names the measurements. On a quiet machine only.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$VENV/bin/python" -m scripts.bench "$@"

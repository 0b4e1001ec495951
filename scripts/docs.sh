#!/usr/bin/env bash
# Sets up and builds the pages in docs/ into site/: bash scripts/docs.sh [serve]
# A link that leads nowhere is an error. "serve" shows the pages on this machine while they change.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
"$VENV/bin/python" -c 'import zensical' 2>/dev/null || "$VENV/bin/python" -m pip install --quiet \
  --disable-pip-version-check --constraint scripts/requirements.lock --editable '.[docs]'
"$VENV/bin/python" scripts/docs.py
if [ "${1:-}" = serve ]; then exec "$VENV/bin/python" -m zensical serve; fi
exec "$VENV/bin/python" -m zensical build --clean --strict

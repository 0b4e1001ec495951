#!/usr/bin/env bash
# Makes .venv in the checkout and installs the project into it; does nothing when it is up to date.
# Source it (". scripts/setup.sh"): it leaves $VENV and the working directory at the checkout's root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV="$PWD/.venv"
wanted=$(cat pyproject.toml scripts/requirements.lock | sha256sum | cut -d' ' -f1)
if [ "$(cat "$VENV/.installed" 2>/dev/null)" != "$wanted" ]; then
  echo "setting up $VENV (once)"
  rm -f "$VENV/.installed"
  "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: Python 3.11 or newer is needed; name one with PYTHON=/path/to/python3" >&2
    exit 2
  }
  [ -x "$VENV/bin/python" ] || "${PYTHON:-python3}" -m venv "$VENV"
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint scripts/requirements.lock --editable '.[dev]'
  echo "$wanted" > "$VENV/.installed"
fi

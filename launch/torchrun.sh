#!/usr/bin/env bash
# Trains on this node, or as one of several: bash launch/torchrun.sh [options] key=value ...
# On each node the same line:  bash launch/torchrun.sh --nodes 4 --head HOST out=runs/a ...
# A number of nodes that may change while the run goes on:  --nodes 2:4
# --print shows the torchrun command; everything else about it: python -m runner launch --help
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
[ -x "$root/.venv/bin/python" ] && PATH="$root/.venv/bin:$PATH"
exec python -m runner launch "$@"

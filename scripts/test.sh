#!/usr/bin/env bash
# Sets up and runs the tests: bash scripts/test.sh [pytest arguments]; --full for the whole matrix.
# The Slurm drills need Slurm, those at system calls strace, pages chromium: as root on Debian they are installed,
# elsewhere the tests are skipped and say so. NO_SLURM=1 leaves Slurm out.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Images set it; every interpreter that a test starts would compile the runner again.
unset PYTHONDONTWRITEBYTECODE
if [ -z "${NO_SLURM:-}" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null &&
  ! PATH="$PATH:/usr/sbin" command -v slurmctld >/dev/null; then
  echo "installing Slurm for its drills (once)"
  # Nothing of it is started, and /etc is not used: each test brings its own cluster.
  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y \
    --no-install-recommends slurm-wlm munge; } >/dev/null 2>&1 || echo "no Slurm could be installed" >&2
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! command -v strace >/dev/null; then
  echo "installing strace for the drills at system calls (once)"
  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y \
    --no-install-recommends strace; } >/dev/null 2>&1 || echo "no strace could be installed" >&2
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! { command -v chromium && command -v tmux; } >/dev/null; then
  echo "installing chromium and tmux for the tests of pages and of top (once)"
  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y \
    --no-install-recommends chromium tmux; } >/dev/null 2>&1 || echo "chromium or tmux could not be installed" >&2
fi
for word in "$@"; do
  if [ -e "${word%%::*}" ]; then exec "$VENV/bin/python" -m pytest "$@"; fi
done
# Without a path sessions run side by side.
exec "$VENV/bin/python" -m tests.side_by_side "$@"

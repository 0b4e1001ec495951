#!/usr/bin/env bash
# Sets up and trains: bash scripts/train.sh [key=value ...]
# Processes: one per GPU, or 2 on a machine without; NPROC=n asks for another number.
# The same command again resumes. Exit codes are the runner's own (README), not torchrun's.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export PATH="$VENV/bin:$PATH"

case " $* " in *" --help "* | *" -h "* | *" --cfg "*) exec python -m runner "$@" ;; esac

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
nproc=${NPROC:-$([ "$gpus" -gt 0 ] && echo "$gpus" || echo 2)}
cores=$(getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores / nproc > 0 ? cores / nproc : 1))}

# A wrong setting is told here, in one line, before any process is started.
out=$(WORLD_SIZE=$nproc RANK=0 LOCAL_RANK=0 LOCAL_WORLD_SIZE=$nproc python -m runner --get out "$@")

code=0
began=$(date +%s)
torchrun --standalone --nproc-per-node="$nproc" -m runner "$@" || code=$?
# torchrun ends with 1 whatever its workers said; what they said is in the summary.
if [ "$code" -ne 0 ] && [ -e "$out/summary.json" ] && [ "$(stat -c %Y "$out/summary.json")" -ge "$began" ]; then
  code=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["exit_code"])' "$out/summary.json")
fi
exit "$code"

#!/usr/bin/env bash
# Sets up and trains: bash scripts/train.sh [key=value ...]
# Processes: one per GPU, or 2 on a machine without; NPROC=n asks for another number.
# The same command again resumes. Exit codes are the runner's own (docs/checkpoints.md), not torchrun's.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export PATH="$VENV/bin:$PATH"

case " $* " in *" --help "* | *" -h "* | *" --cfg "*) exec python -m runner "$@" ;; esac
# Some text that every machine has, unless the command says what to train on.
case " $* " in
*" data="* | *" data.path="* | *" data.kind="* | *" data.sources="* | *" data._target_="*) ;;
*) set -- data=python "$@" ;;
esac
exec python -m runner launch --restarts 0 --nproc "${NPROC:-auto}" "$@"

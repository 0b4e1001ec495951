#!/usr/bin/env bash
# Whether a training goes wrong, for `git bisect run` and for loops over files:
#   git bisect run launch/bisect.sh steps=200 key=value ...
# Ends with 0 where the run is done, with 1 where the guard halts it, and with 125 ("cannot be
# tested") for anything else, such as settings that a commit does not know.
set -u
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
holdfast train out="$out/run" "$@"
case $? in 0) exit 0 ;; 3) exit 1 ;; *) exit 125 ;; esac

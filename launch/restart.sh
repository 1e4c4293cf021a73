#!/usr/bin/env bash
# Runs a command and restarts it until its exit code is final; launch/tpu_vm.sh runs this on every worker.
#   bash launch/restart.sh --restarts=20 -- python -m prope.train --config=configs/quickstart.py --workdir=W
#   --restarts=20   largest number of restarts
#   --pause=10      seconds before each restart
#   --folder=DIR    write into DIR: pid, of this script; log and out, stderr and stdout of the last start; exit, the
#                   final code. Refused where another restart.sh still runs with DIR.
#   --dry-run       print the command and run nothing
# Exit codes 0, 1, 2 and 130 are final. SIGTERM and SIGINT go to the command, and its code after them is final too.
# It exits with the command's last code.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

restarts=20 pause=10 folder='' dry_run=
parse_flags "restarts pause folder" "dry_run" "$@"
shift "$parsed"
positive --restarts "$restarts"
[[ $pause == 0 ]] || positive --pause "$pause"
(($#)) || fail "no command: give it after --, as in: bash launch/restart.sh -- python -m prope.train --help"
if [[ $dry_run ]]; then
  quoted "$@"
  exit
fi

if [[ $folder ]]; then
  mkdir -p "$folder"
  if [[ -f $folder/pid && ! -f $folder/exit ]] && kill -0 "$(<"$folder/pid")" 2>/dev/null; then
    fail "--folder=$folder: process $(<"$folder/pid") still runs there; stop it first, or wait for it"
  fi
  rm -f "$folder"/{exit,out}
  echo $$ >"$folder/pid"
  exec 2>"$folder/log"
fi

child='' stopped=
# shellcheck disable=SC2329 # the traps call it
pass_on() {
  stopped=yes
  [[ -z $child ]] || kill -s "$1" "$child" 2>/dev/null || true
}
trap 'pass_on TERM' TERM
trap 'pass_on INT' INT
set -m # a process group for the command: without it bash lets it ignore SIGINT

for ((start = 0; ; start++)); do
  if [[ $folder ]]; then
    exec >"$folder/out"
  fi
  "$@" &
  child=$!
  while kill -0 "$child" 2>/dev/null; do
    wait "$child" 2>/dev/null || true # a signal that is passed on ends the wait, not the command
    sleep 0.1
  done
  code=0
  wait "$child" 2>/dev/null || code=$?
  child=
  if [[ $stopped ]] || final "$code"; then
    break
  elif ((start == restarts)); then
    echo "restart: exit code $code after $restarts restarts; that is the limit (--restarts)" >&2
    break
  fi
  echo "restart: exit code $code; starting again in $pause s ($((start + 1)) of $restarts)" >&2
  sleep "$pause" >/dev/null 2>&1 &
  wait $! 2>/dev/null || true
  [[ -z $stopped ]] || break
done
[[ -z $folder ]] || echo "$code" >"$folder/exit"
exit "$code"

#!/usr/bin/env bash
# Does one step of launch/tpu_vm.sh on a worker of a slice, from the clone that is installed there.
#   bash prope/launch/tpu_worker.sh start v5p 20 10 python -m prope.train --config=F --workdir=/data/W
#   install COMMIT                            installs Python if it is too old, and the pinned versions
#   check                                     fails if a run is in progress, or nothing is installed
#   start PLATFORM RESTARTS PAUSE COMMAND..   starts the command in the background, by launch/restart.sh
#   report                                    prints the state of the run on one line
#   follow                                    prints the log until the run ends
#   last                                      prints the last line of stdout
#   stop                                      sends SIGTERM to the run
# The files of a run are in ~/prope_run. tpu_vm.sh calls launch/tpu_worker.sh of the clone in ~/prope.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
folder=$HOME/prope_run

running() {
  [[ -s $folder/pid && ! -f $folder/exit ]] && kill -0 "$(<"$folder/pid")" 2>/dev/null
}

install() {
  cd "$ROOT"
  echo "$1" >COMMIT
  # The images of some TPUs have Python 3.10; uv brings a newer one without touching it.
  if ! python3 -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python3 -m pip install --quiet --user uv
    python3 -m uv python install --quiet 3.11
    PYTHON=$(python3 -m uv python find 3.11)
    export PYTHON
  fi
  # shellcheck source-path=SCRIPTDIR source=setup.sh
  source launch/setup.sh tpu
  echo "$HOSTNAME: installed"
}

check() {
  if running; then
    fail "$HOSTNAME: a run is going on; follow it with logs, or end it with stop"
  fi
  [[ -x $ROOT/.venv/bin/python ]] || fail "$HOSTNAME: nothing is installed; do that with install"
}

start() {
  local platform=$1 restarts=$2 pause=$3 tries
  shift 3
  check
  cd "$ROOT"
  # shellcheck source=/dev/null
  source .venv/bin/activate
  rm -f "$folder/pid"
  PROPE_PROCESSES=auto PROPE_COMMIT=$(<COMMIT) PROPE_START_TIMEOUT=${PROPE_START_TIMEOUT:-600} nohup setsid \
    bash launch/restart.sh --restarts="$restarts" --pause="$pause" --folder="$folder" -- \
    bash launch/run.sh "$platform" "$@" </dev/null >/dev/null 2>&1 &
  for ((tries = 0; tries < 50; tries++)); do
    if [[ -s $folder/pid ]]; then
      echo "$HOSTNAME: started"
      return
    fi
    sleep 0.1
  done
  echo "error: $HOSTNAME: the run did not start; try: bash launch/restart.sh in ~/prope" >&2
  exit 1
}

report() {
  if [[ -f $folder/exit ]]; then
    echo "$HOSTNAME: exit $(<"$folder/exit")"
  elif running; then
    echo "$HOSTNAME: running"
  elif [[ -f $folder/pid ]]; then
    echo "$HOSTNAME: exit 137" # killed, and with it who would have started it again
  else
    echo "$HOSTNAME: no run"
  fi
}

follow() {
  exec tail -n +1 --pid="$(<"$folder/pid")" -f "$folder/log"
}

last() {
  tail -n 1 "$folder/out"
}

stop() {
  if running; then
    kill -TERM "$(<"$folder/pid")"
  fi
}

parse_flags "" "" "$@"
shift "$parsed"
case ${1:-} in
  install) refuse_arguments "${@:3}" ;;
  start) (($# > 4)) || fail "start: needs PLATFORM RESTARTS PAUSE COMMAND.." ;;
  check | report | follow | last | stop) refuse_arguments "${@:2}" ;;
  *) fail "${1:-nothing}: there is no such action; --help lists them" ;;
esac
"$@"

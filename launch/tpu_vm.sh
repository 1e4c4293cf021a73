#!/usr/bin/env bash
# Installs this clone on a slice of TPU VMs and runs a command on all of its workers.
#   bash launch/tpu_vm.sh install | logs | stop
#   bash launch/tpu_vm.sh run -- bash launch/run.sh v5p python -m prope.train --config=F --workdir=W
#   install      copies the committed files and installs the pinned versions
#   run          starts the command and follows it; a lost connection does not stop it
#   logs         follows it again: the output of worker 0, then, as by run, the command's exit code
#   stop         asks it to save its state and exit
#   --name=N     of the slice, which is in gcloud's own zone; by default $PROPE_TPU
#   --dry-run    print the gcloud commands and run nothing
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
name=${PROPE_TPU:-} dry_run='' action=${1:-}
case $action in
  --help | -h) usage && exit ;;
  install | run | logs | stop) shift ;;
  *) fail "${action:-no action}: give one of install, run, logs, stop" ;;
esac
parse_flags "name" "dry_run" "$@"
shift "$parsed"
[[ $name ]] || fail "--name=: must be the name of a slice; give it here or in PROPE_TPU"
[[ $action == run || $# == 0 ]] || fail "$1: $action takes no command; only run does"
[[ $action != run || $# -gt 0 ]] || fail "no command: give it after --, as in: run -- true"

tpu_vm() {
  local line=(gcloud compute tpus tpu-vm "$@" --quiet)
  if [[ $dry_run ]]; then quoted "${line[@]}"; else "${line[@]}" </dev/null; fi
}
remote() { tpu_vm ssh "$name" --worker="$1" --command="$2"; }
# ~/prope_run of every worker holds pid, log and, once the command has ended, its exit code.
running="{ [[ ! -f prope_run/exit ]] && kill -0 \$(<prope_run/pid); } 2>/dev/null"
state="if $running; then echo running; else echo exit \$(cat prope_run/exit || echo 137); fi"
if [[ $action == stop ]]; then
  remote all "if $running; then kill -TERM -- -\$(<prope_run/pid); fi"
  exit
elif [[ $action == install ]]; then
  [[ ! $(git -C "$ROOT" status --porcelain) ]] || fail "the tree holds changes; commit them"
  [[ $dry_run ]] || git -C "$ROOT" archive --output="${TMPDIR:-/tmp}/prope.tar.gz" HEAD
  tpu_vm scp "${TMPDIR:-/tmp}/prope.tar.gz" "$name:" --worker=all
  remote all "rm -rf prope && mkdir prope && tar -xzf prope.tar.gz -C prope && cd prope &&
    echo $(commit) >COMMIT && source launch/setup.sh tpu"
  exit
elif [[ $action == run ]]; then
  remote all "if $running; then echo error: a run is going on, end it with stop >&2; exit 2; fi
    rm -rf prope_run && mkdir prope_run && cd prope && source .venv/bin/activate || exit
    export PROPE_PROCESSES=auto PROPE_COMMIT=\$(<COMMIT)
    nohup setsid bash -c 'trap : TERM; \"\$@\"; echo \$? >../prope_run/exit' run $(quoted "$@") \
      </dev/null >../prope_run/log 2>&1 & echo \$! >../prope_run/pid"
fi
remote 0 "tail -n +1 --pid=\$(<prope_run/pid) -F prope_run/log" &
report=running lost=0
until [[ $report != *running* || $dry_run ]]; do
  sleep 30
  if report=$(remote all "$state"); then lost=0; else report=running lost=$((lost + 1)); fi
  ((lost < 5)) || { echo "stopped: $name is lost; logs follows the run again" >&2 && exit 1; }
done
wait
# shellcheck disable=SC2046 # a word for each worker
exit "$(decide $(sed -n 's/^.*exit //p' <<<"$report"))"

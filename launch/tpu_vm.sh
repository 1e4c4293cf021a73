#!/usr/bin/env bash
# Creates a slice of TPU VMs, installs this clone on its workers and runs a command on all of them.
#   bash launch/tpu_vm.sh create  --name=N --zone=Z --type=v5p-128
#   bash launch/tpu_vm.sh install --name=N --zone=Z
#   bash launch/tpu_vm.sh run     --name=N --zone=Z --type=v5p-128 -- python -m prope.train --config=F --workdir=gs://B/W
#   bash launch/tpu_vm.sh logs | stop | delete   --name=N --zone=Z
#   create           creates the slice; with --queue it waits until there is one
#   install          installs the committed files and the pinned versions on every worker
#   run              runs the command on all workers, with the XLA flags of the type; a lost connection does not stop it
#   logs             follows the run; like run it ends with the run's exit code and its last line on stdout
#   stop             asks the run to save its state and exit
#   delete           deletes the slice
#   --name=N         of the slice; by default $PROPE_TPU
#   --zone=Z         by default $PROPE_TPU_ZONE, else gcloud's own
#   --type=T         v5litepod-N (v5e), v5p-N or v6e-N, as in v5p-128; by default $PROPE_TPU_TYPE
#   --version=V      software of the VMs; by default the one for the type
#   --queue          create, delete: a queued resource, which waits until a slice is free
#   --spot           create: Spot VMs
#   --allow-changes  install: include uncommitted changes of tracked files
#   --poll=30        seconds between looks at the queue, or at the workers
#   --dry-run        print the commands and run nothing
# It neither brings back a VM that is taken away nor restarts a run: launch/sky.yaml does both. By hand: delete, create
# and install, then run the same command, which resumes from its last checkpoint.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

name=${PROPE_TPU:-} zone=${PROPE_TPU_ZONE:-} type=${PROPE_TPU_TYPE:-} version='' queue='' spot='' allow_changes=''
dry_run='' poll=30 action=${1:-}
case $action in
  --help | -h) usage && exit ;;
  create | install | run | logs | stop | delete) shift ;;
  *) fail "${action:-no action}: give one of create, install, run, logs, stop, delete" ;;
esac
parse_flags "name zone type version poll" "queue spot allow_changes dry_run" "$@"
shift "$parsed"
[[ $name =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] ||
  fail "--name=$name: must be a name of small letters, digits and hyphens; give it here or in PROPE_TPU"
positive --poll "$poll"
case $type in # Source of the versions: Cloud TPU's documentation, "TPU software versions", PyTorch and JAX.
  v5litepod-[1-9]*) platform=v5e version=${version:-v2-alpha-tpuv5-lite} ;;
  v5p-[1-9]*) platform=v5p version=${version:-v2-alpha-tpuv5} ;;
  v6e-[1-9]*) platform=v6e version=${version:-v2-alpha-tpuv6e} ;;
  *) [[ $action != create && $action != run ]] ||
    fail "--type=$type: must be v5litepod-N, v5p-N or v6e-N, as in v5p-128; give it here or in PROPE_TPU_TYPE" ;;
esac
[[ $action == run || $# == 0 ]] || fail "$1: $action takes no command; only run does"
[[ $action != run || $# -gt 0 ]] || fail "no command: give it after --, as in: run -- python -m prope.train --help"

# execute COMMAND..: runs it, or with --dry-run prints it.
execute() { if [[ $dry_run ]]; then quoted "$@"; else "$@"; fi; }
cloud() { execute gcloud compute tpus "$@" ${zone:+"--zone=$zone"} --quiet; }
# remote WORKER COMMAND: runs it by ssh on one worker, or on all.
remote() { cloud tpu-vm ssh "$name" --worker="$1" --command="$2" </dev/null; }
# The state of a run is in ~/prope_run of every worker: pid, log, out, and exit with the code.
# shellcheck disable=SC2016 # the worker expands it
RUNNING='[[ -s prope_run/pid && ! -f prope_run/exit ]] && kill -0 "$(<prope_run/pid)" 2>/dev/null'
REPORT="if $RUNNING; then echo running; elif [[ -d prope_run ]]; then echo \"exit \$(cat prope_run/exit 2>/dev/null || echo 137)\"; fi"

create() {
  local state=''
  if [[ ! $queue ]]; then
    cloud tpu-vm create "$name" --accelerator-type="$type" --version="$version" ${spot:+--spot}
    return
  fi
  cloud queued-resources create "$name" --node-id="$name" --accelerator-type="$type" --runtime-version="$version" \
    ${spot:+--spot}
  until [[ $dry_run || $state == ACTIVE ]]; do
    [[ ! $state =~ FAILED|SUSPEND ]] || fail "--name=$name: the request is $state; remove it by delete --queue"
    sleep "$poll"
    state=$(cloud queued-resources describe "$name" --format='value(state.state)') || true
  done
}

install() {
  local archive=${TMPDIR:-/tmp}/prope-$name-$$.tar.gz tree
  tree=$(committed_tree "$allow_changes")
  execute git -C "$ROOT" archive --format=tar.gz --output="$archive" "$tree"
  remote 0 true # makes the ssh key and spreads it; all workers at once would each try to
  [[ $dry_run ]] || ssh-add -q ~/.ssh/google_compute_engine 2>/dev/null || true # gcloud uses an agent, if there is one
  cloud tpu-vm scp "$archive" "$name:prope.tar.gz" --worker=all
  remote all "mkdir -p prope && find prope -mindepth 1 -maxdepth 1 ! -name .venv -exec rm -rf {} + && \
tar -xzf prope.tar.gz -C prope && cd prope && echo $(commit) >COMMIT && source launch/setup.sh tpu"
  execute rm "$archive"
}

run() {
  remote all "if $RUNNING; then echo error: a run is going on, end it with stop >&2; exit 2; fi; rm -rf prope_run; \
mkdir prope_run; cd prope && source .venv/bin/activate || exit; export PROPE_PROCESSES=auto PROPE_COMMIT=\$(<COMMIT); \
nohup setsid bash -c 'trap : TERM; code=0; \"\$@\" >../prope_run/out || code=\$?; echo \$code >../prope_run/exit' run \
bash launch/run.sh $platform $(quoted "$@") </dev/null >/dev/null 2>../prope_run/log & echo \$! >../prope_run/pid"
  logs
}

# Copies the log of worker 0 to stderr until all workers have ended; then prints the last line of its stdout.
logs() {
  local report=running codes failures=0
  remote 0 "[[ ! -d prope_run ]] || tail -n +1 --pid=\$(<prope_run/pid) -F prope_run/log" >&2 &
  while [[ $report == *running* && ! $dry_run ]]; do
    sleep "$poll"
    report=$(remote all "$REPORT") && failures=0 && continue
    report=running
    ((++failures < 5)) || { echo "lost: the workers of $name do not answer; logs follows the run again" >&2 && exit 76; }
  done
  wait
  read -r -a codes -d '' < <(sed -n 's/^.*exit //p' <<<"$report") || true
  [[ ${codes[*]-} || $dry_run ]] || fail "--name=$name: no run has been started on its workers; start one with run"
  remote 0 'tail -n 1 prope_run/out'
  exit "$(decide ${codes[@]+"${codes[@]}"})"
}

case $action in
  stop) remote all "if $RUNNING; then kill -TERM -- -\$(<prope_run/pid); fi" ;;
  delete) if [[ $queue ]]; then cloud queued-resources delete "$name" --force; else cloud tpu-vm delete "$name"; fi ;;
  *) "$action" "$@" ;;
esac

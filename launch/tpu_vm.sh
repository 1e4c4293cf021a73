#!/usr/bin/env bash
# Creates a slice of TPU VMs, installs this clone on its workers and runs a command on all of them.
#   bash launch/tpu_vm.sh create  --name=N --zone=Z --type=v5p-128
#   bash launch/tpu_vm.sh install --name=N --zone=Z
#   bash launch/tpu_vm.sh run     --name=N --zone=Z --type=v5p-128 -- python -m prope.train --config=F --workdir=/data/W
#   bash launch/tpu_vm.sh logs | status | stop | delete   --name=N --zone=Z
#   create           creates the slice
#   install          installs the committed files and the pinned versions on every worker
#   run              runs the command on all workers, with the XLA flags of the type; a lost connection does not stop it
#   logs             follows the run; like run it ends with the run's exit code and its last line on stdout
#   status           prints the state of the slice and of the run
#   stop             asks the run to save its state and exit
#   delete           deletes the slice
#   --name=N         of the slice; by default $PROPE_TPU
#   --zone=Z         by default $PROPE_TPU_ZONE, else gcloud's own
#   --project=P      by default $PROPE_TPU_PROJECT, else gcloud's own
#   --type=T         v5litepod-N (v5e), v5p-N or v6e-N, as in v5p-128; by default $PROPE_TPU_TYPE
#   --version=V      software of the VMs; by default the one for the type
#   --queue          create, status, delete: a queued resource, which waits until a slice is free
#   --spot           create: Spot VMs
#   --allow-changes  install: include uncommitted changes of tracked files
#   --mount=COMMAND  install: run on every worker to mount the folder that all share, as in
#                    "sudo mkdir -p /data && sudo mount 10.0.0.2:/share /data"
#   --restarts=20    run: largest number of restarts after a lost or stopped run
#   --pause=10       run: seconds before each restart
#   --poll=30        run, logs: seconds between polls of the workers
#   --dry-run        print the commands and run nothing
# The workdir must be a folder that all workers share: see --mount. When a worker fails for good, run and logs stop the
# others; if neither is connected, these give up after --restarts times $PROPE_START_TIMEOUT, 600 s here.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

name=${PROPE_TPU:-} zone=${PROPE_TPU_ZONE:-} project=${PROPE_TPU_PROJECT:-} type=${PROPE_TPU_TYPE:-}
action=${1:-} version='' queue='' spot='' allow_changes='' mount='' restarts=20 pause=10 dry_run='' poll=30
actions='create, install, run, logs, status, stop, delete'
case $action in
  --help | -h) usage && exit ;;
  create | install | run | logs | status | stop | delete) shift ;;
  '') fail "no action: give one of $actions" ;;
  *) fail "$action: there is no such action; give one of $actions" ;;
esac
parse_flags "name zone project type version mount restarts pause poll" "queue spot allow_changes dry_run" "$@"
shift "$parsed"
[[ $name =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] ||
  fail "--name=$name: must be a name of small letters, digits and hyphens; give it here or in PROPE_TPU"
positive --restarts "$restarts"
[[ $pause == 0 ]] || positive --pause "$pause"
positive --poll "$poll"
[[ $action == run || $# == 0 ]] || fail "$1: $action takes no command; only run does"
if [[ $action == create || $action == run ]]; then
  # Source of the versions: Cloud TPU's documentation, "TPU software versions", PyTorch and JAX.
  case $type in
    v5litepod-[1-9]*) platform=v5e version=${version:-v2-alpha-tpuv5-lite} ;;
    v5p-[1-9]*) platform=v5p version=${version:-v2-alpha-tpuv5} ;;
    v6e-[1-9]*) platform=v6e version=${version:-v2-alpha-tpuv6e} ;;
    *) fail "--type=$type: must be v5litepod-N, v5p-N or v6e-N, as in v5p-128; give it here or in PROPE_TPU_TYPE" ;;
  esac
fi
[[ $action != run || $# -gt 0 ]] || fail "no command: give it after --, as in: run -- python -m prope.train --help"

place=(${zone:+"--zone=$zone"} ${project:+"--project=$project"} --quiet)
# execute COMMAND..: runs it, or with --dry-run prints it.
execute() {
  if [[ $dry_run ]]; then
    quoted "$@"
  else
    "$@"
  fi
}
cloud() {
  execute gcloud compute tpus "$@" "${place[@]}"
}
# remote WORKER COMMAND: runs it by ssh on one worker, or on all at once.
remote() {
  cloud tpu-vm ssh "$name" --worker="$1" --command="$2"
}

WORKER="bash prope/launch/tpu_worker.sh" # on every worker, in its home directory

create() {
  if [[ $queue ]]; then
    cloud queued-resources create "$name" --node-id="$name" --accelerator-type="$type" --runtime-version="$version" \
      ${spot:+--spot}
  else
    cloud tpu-vm create "$name" --accelerator-type="$type" --version="$version" ${spot:+--spot}
  fi
}

install() {
  local archive tree
  archive=${TMPDIR:-/tmp}/prope-$name-$$.tar.gz
  tree=$(committed_tree "$allow_changes")
  execute git -C "$ROOT" archive --format=tar.gz --output="$archive" "$tree"
  # The first call makes the ssh key and spreads it; all workers at once would each try to.
  remote 0 true
  if [[ ${SSH_AUTH_SOCK:-} && -z $dry_run ]]; then
    ssh-add -q ~/.ssh/google_compute_engine 2>/dev/null || true # gcloud asks for it with several workers
  fi
  cloud tpu-vm scp "$archive" "$name:prope.tar.gz" --worker=all
  remote all "mkdir -p prope && find prope -mindepth 1 -maxdepth 1 ! -name .venv -exec rm -rf {} + && \
tar -xzf prope.tar.gz -C prope && $WORKER install $(commit)"
  execute rm "$archive"
  [[ -z $mount ]] || remote all "$mount"
}

run() {
  remote all "$WORKER check" # before any of them starts
  remote all "$WORKER start $platform $restarts $pause $(quoted "$@")"
  logs
}

# Copies the log of worker 0 to stderr until all workers have ended; then prints the last line of its stdout.
logs() {
  local report='' codes=() failures=0 stopping='' tail
  if [[ $dry_run ]]; then
    remote 0 "$WORKER follow"
    remote all "$WORKER report"
    remote 0 "$WORKER last"
    return
  fi
  remote 0 "$WORKER follow" </dev/null >&2 &
  tail=$!
  # shellcheck disable=SC2064 # now, not when it ends
  trap "kill $tail 2>/dev/null || true" EXIT
  while :; do
    sleep "$poll"
    if ! report=$(remote all "$WORKER report" </dev/null); then
      failures=$((failures + 1))
      if ((failures == 5)); then
        echo "lost: the workers of $name do not answer; see status; logs follows the run again, where it goes on" >&2
        exit 76
      fi
      continue
    fi
    failures=0
    read -r -d '' -a codes < <(sed -n 's/.*: exit //p' <<<"$report") || true
    [[ $report == *': running'* ]] || break
    if [[ -z $stopping && $(decide ${codes[@]+"${codes[@]}"}) =~ ^(1|2|130)$ ]]; then
      echo "a worker has failed for good, so the others are stopped" >&2
      remote all "$WORKER stop" </dev/null || true
      stopping=yes
    fi
  done
  ((${#codes[@]})) || fail "--name=$name: no run has been started on its workers; start one with run"
  wait "$tail" || true
  echo "$report" >&2
  remote 0 "$WORKER last" </dev/null || true
  exit "$(decide "${codes[@]}")"
}

status() {
  if [[ $queue ]]; then
    cloud queued-resources describe "$name" --format='value(state.state)'
  else
    cloud tpu-vm describe "$name" --format='value(state,health)'
    remote all "$WORKER report"
  fi
}

stop() {
  remote all "$WORKER stop"
}

delete() {
  if [[ $queue ]]; then
    cloud queued-resources delete "$name" --force
  else
    cloud tpu-vm delete "$name"
  fi
}

"$action" "$@"

#!/usr/bin/env bash
# A slice of TPU VMs, from nothing to a run on all its workers:
#   bash launch/tpu_vm.sh create  --name=N --zone=Z --type=v5p-128 [--queue] [--spot] [--version=V]
#   bash launch/tpu_vm.sh install --name=N --zone=Z
#   bash launch/tpu_vm.sh run     --name=N --zone=Z --type=v5p-128 -- python -m prope.train --config=F --workdir=/data/W
#   bash launch/tpu_vm.sh logs | status | stop | delete   --name=N --zone=Z
# create     the slice; --queue: a queued resource, which waits until there is one; then ask with status --queue
# install    this clone's committed tree, with its pinned versions, on every worker
# run        the command on all workers, with the XLA flags of their kind; a lost connection does not stop it
# logs       follows the run again; run and logs end as it does: its last line on stdout, its exit code
# stop       asks the run to save its state and end           delete   the slice; --queue: and its place in the queue
#   --name, --zone, --project, --type   by default $PROPE_TPU, $PROPE_TPU_ZONE, $PROPE_TPU_PROJECT, $PROPE_TPU_TYPE;
#                        without zone or project gcloud's own defaults; types: v5litepod-N (v5e), v5p-N, v6e-N
#   --version=V          the VM's software, by default the one for the type
#   --allow-changes      install tracked files with changes that are not committed
#   --mount=COMMAND      run by install on every worker, to mount what all share, such as
#                        "sudo mkdir -p /data && sudo mount 10.0.0.2:/share /data"
#   --restarts=20        how often a worker starts a command again that is lost or was stopped, --pause=10 s later
#   --poll=30            seconds between looks at all workers, while a run is followed
#   --dry-run            print the commands and run nothing
# The workdir must be a folder that all workers see: see --mount. When one worker fails for good, run and logs stop the others; should
# neither be connected, those give up by themselves, after --restarts times $PROPE_START_TIMEOUT (600 s here).
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

name=${PROPE_TPU:-} zone=${PROPE_TPU_ZONE:-} project=${PROPE_TPU_PROJECT:-} type=${PROPE_TPU_TYPE:-}
action=${1:-} version='' queue='' spot='' changes='' mount='' restarts=20 pause=10 dry_run='' poll=30
actions='create, install, run, logs, status, stop, delete'
case $action in
  --help | -h) usage && exit ;;
  create | install | run | logs | status | stop | delete) shift ;;
  '') fail "no action: give one of $actions" ;;
  *) fail "$action: there is no such action; give one of $actions" ;;
esac
while (($#)); do
  case $1 in
    --name=*) name=${1#*=} ;;
    --zone=*) zone=${1#*=} ;;
    --project=*) project=${1#*=} ;;
    --type=*) type=${1#*=} ;;
    --version=*) version=${1#*=} ;;
    --mount=*) mount=${1#*=} ;;
    --restarts=*) restarts=${1#*=} ;;
    --pause=*) pause=${1#*=} ;;
    --poll=*) poll=${1#*=} ;;
    --queue) queue=yes ;;
    --spot) spot=yes ;;
    --allow-changes) changes=yes ;;
    --dry-run) dry_run=yes ;;
    --help | -h) usage && exit ;;
    --) shift && break ;;
    -*) fail "$1: there is no such flag; --help lists them" ;;
    *) break ;;
  esac
  shift
done
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
# shown COMMAND..: runs it, or with --dry-run prints it.
shown() {
  if [[ $dry_run ]]; then
    quoted "$@"
  else
    "$@"
  fi
}
cloud() {
  shown gcloud compute tpus "$@" "${place[@]}"
}
# remote WORKER COMMAND: by ssh; WORKER is a number or all, at once.
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
  tree=$(committed_tree "$changes")
  shown git -C "$ROOT" archive --format=tar.gz --output="$archive" "$tree"
  # The first call makes the ssh key and spreads it; all workers at once would each try to.
  remote 0 true
  if [[ ${SSH_AUTH_SOCK:-} && -z $dry_run ]]; then
    ssh-add -q ~/.ssh/google_compute_engine 2>/dev/null || true # gcloud asks for it with several workers
  fi
  cloud tpu-vm scp "$archive" "$name:prope.tar.gz" --worker=all
  remote all "mkdir -p prope && find prope -mindepth 1 -maxdepth 1 ! -name .venv -exec rm -rf {} + && \
tar -xzf prope.tar.gz -C prope && $WORKER install $(commit)"
  shown rm "$archive"
  [[ -z $mount ]] || remote all "$mount"
}

run() {
  remote all "$WORKER check" # before any of them starts
  remote all "$WORKER start $platform $restarts $pause $(quoted "$@")"
  logs
}

# The log of worker 0 to stderr, until all workers have ended; then the last line of its stdout, and its exit code.
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

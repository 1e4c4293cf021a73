#!/usr/bin/env bash
# Runs a command in several processes on this machine, as on a pod, each with fake CPU devices.
#   bash launch/local_pod.sh --processes=2 -- python -m prope.train --config=configs/quickstart.py:tiny --workdir=W
#   --processes=2   number of processes
#   --devices=2     fake CPU devices per process
#   --dry-run       print the commands and run nothing
# Only process 0 writes to stdout; its last line is the result. All other output goes to stderr: first "process i: pid P"
# for each process, then every line of process i after "[i] ". SIGTERM, SIGINT and SIGHUP go to every process.
# It waits for all processes and exits with the first of 2, 1, 130, 75, 76 that one of them exits with, else with any
# other code that is not 0.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

processes=2 devices=2 dry_run=
parse_flags "processes devices" "dry_run" "$@"
shift "$parsed"
positive --processes "$processes"
positive --devices "$devices"
(($#)) || fail "no command: give it after --, as in: bash launch/local_pod.sh -- python -m prope.train --help"

# Pods that start at the same time have different pids and so try different ports, below the ephemeral range.
port=$((10000 + $$ % 20000))
while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do
  port=$((10000 + (port + 7919) % 20000))
done

environment=(
  JAX_PLATFORMS=cpu
  "XLA_FLAGS=${XLA_FLAGS:+$XLA_FLAGS }--xla_force_host_platform_device_count=$devices"
  "PROPE_COMMIT=$(commit)"
)
if [[ $dry_run ]]; then
  for ((i = 0; i < processes; i++)); do
    quoted env "${environment[@]}" "PROPE_PROCESSES=$i/$processes@127.0.0.1:$port" "$@"
  done
  exit
fi

# prefix I: copies every line of stdin to stderr after "[I] ", each in one write.
prefix() {
  trap '' INT TERM HUP
  local line LC_ALL=C
  while IFS= read -r line || [[ $line ]]; do
    printf '[%s] %s\n' "$1" "$line" >&2
  done
}

pids=() printers=() started='' pending='' received=''
pass_on() {
  received=yes
  if [[ -z $started ]]; then
    pending=$1
    return
  fi
  local pid
  for pid in "${pids[@]}"; do
    [[ -z $pid ]] || kill -s "$1" "$pid" || true
  done
}
trap 'pass_on TERM' TERM
trap 'pass_on INT' INT
trap 'pass_on HUP' HUP

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
set -m # a process group for each, or a terminal's Ctrl-C would reach them twice: once by itself, once passed on
for ((i = 0; i < processes; i++)); do
  mkfifo "$folder/$i"
  prefix "$i" <"$folder/$i" >/dev/null &
  printers+=("$!")
  if ((i == 0)); then
    exec 3>&1
  else
    exec 3>"$folder/$i"
  fi
  (exec env "${environment[@]}" "PROPE_PROCESSES=$i/$processes@127.0.0.1:$port" "$@") </dev/null 2>"$folder/$i" >&3 3>&- &
  pids+=("$!")
  exec 3>&-
  echo "process $i: pid ${pids[i]}" >&2
done
exec 2>/dev/null # from here on bash would only report which process was killed, as the exit code does
started=yes
[[ -z $pending ]] || pass_on "$pending"

# Not `wait` alone: it also ends where a signal is passed on, and where a process is stopped for a while.
codes=()
while ((${#codes[@]} < processes)); do
  sleep 0.1
  for ((i = 0; i < processes; i++)); do
    if [[ -z ${pids[i]} ]] || kill -0 "${pids[i]}"; then
      continue
    fi
    received=yes
    while [[ $received ]]; do # a signal cuts `wait` short
      received='' code=0
      wait "${pids[i]}" || code=$?
    done
    codes+=("$code")
    pids[i]=
  done
done

# All have ended. A signal that interrupts bash while it reads the exit code below would leave none to exit with.
trap '' TERM INT HUP

# Children of the processes may hold stderr open: wait for its last lines, but at most 5 s.
for ((tries = 0; tries < 50; tries++)); do
  kill -0 "${printers[@]}" || break
  sleep 0.1
done
kill -KILL "${printers[@]}" || true

exit "$(decide "${codes[@]}")"

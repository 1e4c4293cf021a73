#!/usr/bin/env bash
# Trains a small p-RoPE decoder on a laptop, draws its loss curve, samples from it and evaluates it.
#   bash launch/quickstart.sh [WORKDIR]
#   WORKDIR   directory of the run, by default runs/quickstart below the clone
# It trains on the GPU or TPU that setup.sh finds; PROPE_EXTRA= trains on the CPU.
# The text is Python's own documentation. Rerun it to resume an interrupted run; remove WORKDIR to train anew.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse_flags "" "" "$@"
shift "$parsed"
workdir=${1:-runs/quickstart}
refuse_arguments "${@:2}"
cd "$ROOT"
set -- # setup.sh would read them
source launch/setup.sh

python -m prope.train --config=configs/quickstart.py --workdir="$workdir"
python -m prope.report --workdir="$workdir"
python -m prope.sample --workdir="$workdir" --prompt="Return a new list that"
python -m prope.evaluate --workdir="$workdir"

# stdout ends with the evaluation's JSON object.
cat >&2 <<TEXT

The run is in $workdir. Now try:
  source launch/setup.sh
  python -m prope                                        # all commands
  python -m prope.analyze --workdir=$workdir             # which pairs the heads use
  python launch/sweep.py --config=configs/quick_sweep.py --workdir=runs/sweep    # five values of p, 6 minutes
TEXT

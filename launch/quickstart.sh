#!/usr/bin/env bash
# Trains a small p-RoPE decoder on a laptop, draws its loss curve, samples from it and evaluates it.
#   bash launch/quickstart.sh [WORKDIR]
#   WORKDIR   directory of the run, by default runs/quickstart below the clone
# The text is Python's own documentation. Rerun it to resume an interrupted run; remove WORKDIR to train anew.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse_flags "" "" "$@"
shift "$parsed"
workdir=${1:-runs/quickstart}
refuse_arguments "${@:2}"
cd "$ROOT"
source launch/setup.sh ""

python -m prope.train --config=configs/quickstart.py --workdir="$workdir"
python -m prope.report --workdir="$workdir"
python -m prope.sample --workdir="$workdir" --prompt="Return a new list that"
python -m prope.evaluate --workdir="$workdir"

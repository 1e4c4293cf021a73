#!/usr/bin/env bash
# Trains a small p-RoPE decoder on Python's own documentation, draws its loss curve, continues a prompt and evaluates
# the saved checkpoint, on any laptop:
#   bash launch/quickstart.sh [workdir]        workdir: runs/quickstart by default
# Run again it takes up an interrupted run; remove the workdir to train anew.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
workdir=${1:-runs/quickstart}
source launch/setup.sh ""

python -m prope.train --config=configs/quickstart.py --workdir="$workdir"
python -m prope.report --workdir="$workdir"
python -m prope.sample --workdir="$workdir" --prompt="Return a new list that"
python -m prope.evaluate --workdir="$workdir"

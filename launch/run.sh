#!/usr/bin/env bash
# Runs a command with the XLA flags of a platform (prope/runtime/xla_flags.py says which, and why):
#   bash launch/run.sh v5e|v5p|v6e|gpu|cpu python -m prope.train --config=.. --workdir=..
# Flags that you have set in LIBTPU_INIT_ARGS or XLA_FLAGS come after these, and win.
set -euo pipefail

platform=${1:?"a platform: v5e, v5p, v6e, gpu or cpu"}
shift
flags=$(python -m prope.runtime.xla_flags "$platform")
eval "$flags"
exec "${@:?"the command to run"}"

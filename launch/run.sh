#!/usr/bin/env bash
# Runs a command with the XLA flags of a platform (prope/runtime/xla_flags.py has each with its source).
#   bash launch/run.sh PLATFORM COMMAND..
#   bash launch/run.sh gpu python -m prope.train --config=configs/gemma_300m_wiki.py --workdir=W
#   PLATFORM   v5e, v5p, v6e, gpu or cpu
# Flags that you set in LIBTPU_INIT_ARGS or XLA_FLAGS are appended; they and other variables that you set win.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse_flags "" "" "$@"
shift "$parsed"
(($#)) || fail "no platform: give v5e, v5p, v6e, gpu or cpu"
flags=$(python -m prope.runtime.xla_flags "$1")
shift
(($#)) || fail "no command: give it after the platform"
eval "$flags"
exec "$@"

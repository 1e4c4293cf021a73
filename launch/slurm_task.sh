#!/usr/bin/env bash
# Runs one task of a Slurm step and encodes its exit code; launch/slurm.sbatch gives it to srun.
#   bash launch/slurm_task.sh -- python -m prope.train --config=configs/quickstart.py --workdir=W
# srun exits with the greatest code of its tasks, so the codes that take precedence become the greatest: 2, 1, 130, 75
# and 76 become 254, 253, 252, 251 and 250, and other codes above 249 become 249. launch/slurm.sbatch decodes them.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse_flags "" "" "$@"
shift "$parsed"
(($#)) || fail "no command: launch/slurm.sbatch gives it to srun; --help says more"

trap : TERM INT # Slurm signals the command as well; this waits for it
code=0
"$@" || code=$?
case $code in
  2) exit 254 ;;
  1) exit 253 ;;
  130) exit 252 ;;
  75) exit 251 ;;
  76) exit 250 ;;
  *) exit $((code < 249 ? code : 249)) ;;
esac

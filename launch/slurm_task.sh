#!/usr/bin/env bash
# Runs one task of a Slurm step: bash launch/slurm_task.sh COMMAND..
# srun exits with the greatest code of its tasks. For that to be the one that counts, final codes become the greatest:
# 2, 1, 130, 75, 76 become 254, 253, 252, 251, 250, and what is greater than 249 becomes 249; launch/slurm.sbatch
# reads them.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
case ${1:-} in
  --help | -h) usage && exit ;;
  '') fail "no command: this is what launch/slurm.sbatch gives to srun; --help says more" ;;
esac

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

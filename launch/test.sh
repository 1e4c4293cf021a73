#!/usr/bin/env bash
# Installs what the tests need and runs them, on as many processes as there are cores, four at most.
#   bash launch/test.sh [PYTEST ARGUMENTS]
#   bash launch/test.sh -k rope
# Slow tests are left out; -m "" runs all. tests/README.md has the tiers and how long they take.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
case ${1:-} in -h | --help) usage && exit ;; esac
cd "$ROOT"
source launch/setup.sh test

python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal "$@"

#!/usr/bin/env bash
# Runs the tests, a file of them per process and as many processes as there are cores, after installing what they need:
#   bash launch/test.sh [pytest arguments]
# Those marked slow are left out, unless asked for: -m "" runs all, which takes twice as long.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup.sh test

python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile "$@"

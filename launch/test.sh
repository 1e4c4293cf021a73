#!/usr/bin/env bash
# Runs the tests, after installing what they need:
#   bash launch/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup.sh test

python -m pytest "$@"

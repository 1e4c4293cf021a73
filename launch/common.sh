# shellcheck shell=bash
# Sourced by the scripts that start runs on pods and clusters: usage, errors, dry runs and the commit.
#   source launch/common.sh
# Exit codes of prope that are final; after any other the same command, with the same --workdir, goes on:
#   0 done   1 failed, needs a person   2 the input cannot be used   130 Ctrl-C

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# The comment at the head of the script that runs.
usage() {
  sed -n '/^#!/d; /^#SBATCH/d; /^[^#]/q; s/^# \{0,1\}//p' "$0"
}

fail() {
  echo "error: $*" >&2
  exit 2
}

# positive --flag VALUE
positive() {
  [[ $2 =~ ^[1-9][0-9]{0,5}$ ]] || fail "$1=$2: must be a whole number from 1"
}

# The commit that runs, +changes where the tree holds more than it; nothing where git knows no commit.
commit() {
  local hash=${PROPE_COMMIT:-}
  if [[ -z $hash && -e $ROOT/.git ]] && hash=$(git -C "$ROOT" rev-parse HEAD 2>/dev/null); then
    [[ -z $(git -C "$ROOT" status --porcelain) ]] || hash+=+changes
  fi
  echo "$hash"
}

# committed_tree ALLOW_CHANGES: what git archive takes; with changes, those of tracked files are part of it.
committed_tree() {
  local tree=
  [[ -e $ROOT/.git ]] || fail "$ROOT: is not a git clone; what is committed there would be taken"
  if [[ $(git -C "$ROOT" status --porcelain) ]]; then
    [[ $1 ]] || fail "the tree holds changes that are not committed; commit them, or give --allow-changes"
    tree=$(git -C "$ROOT" stash create)
  fi
  echo "${tree:-HEAD}"
}

# final CODE: whether a run that ended with it is not to be started again.
final() {
  [[ $1 =~ ^(0|1|2|130)$ ]]
}

# decide CODE..: the one that speaks for all processes of a run: the final ones first, then who was asked to stop.
decide() {
  local code result=0
  for code in "$@"; do
    ((code == 0)) || result=$code
  done
  for code in 76 75 130 1 2; do
    [[ " $* " != *" $code "* ]] || result=$code
  done
  echo "$result"
}

# The arguments as one line that a shell reads back as the same arguments.
quoted() {
  local line
  printf -v line '%q ' "$@"
  echo "${line% }"
}

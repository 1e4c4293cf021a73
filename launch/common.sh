# shellcheck shell=bash
# Functions that the scripts in launch/ share: flags, --help, errors, dry runs, exit codes and the commit.
#   source launch/common.sh
# Exit codes of prope that are final; after any other the same command, with the same --workdir, resumes:
#   0 done   1 failed, needs a person   2 invalid input   130 Ctrl-C

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Prints the comment at the head of the running script.
usage() {
  sed -n '/^#!/d; /^#SBATCH/d; /^[^#]/q; s/^# \{0,1\}//p' "$0"
}

fail() {
  echo "error: $*" >&2
  exit 2
}

# parse_flags "VALUES" "SWITCHES" ARGUMENTS..: --name=VALUE sets the variable of a flag in VALUES, --name sets one in
# SWITCHES to yes; a - within a name is a _ in the variable. Sets `parsed` to the number of arguments up to the command.
parse_flags() {
  local _name _values=" $1 " _switches=" $2 " _total # underscored, or they would hide the script's variables
  shift 2
  _total=$#
  while (($#)); do
    _name=${1%%=*} _name=${_name#--} _name=${_name//-/_}
    if [[ $1 == --help || $1 == -h ]]; then
      usage
      exit
    elif [[ $1 == -- ]]; then
      shift
      break
    elif [[ $1 == --*=* && $_values == *" $_name "* ]]; then
      printf -v "$_name" %s "${1#*=}"
    elif [[ $1 == --* && $1 != *=* && $_switches == *" $_name "* ]]; then
      printf -v "$_name" yes
    elif [[ $1 == -* ]]; then
      [[ $_values != *" $_name "* ]] || fail "$1: needs a value: $1=VALUE"
      [[ $_switches != *" $_name "* ]] || fail "$1: takes no value"
      fail "$1: there is no such flag; --help lists them"
    else
      break
    fi
    shift
  done
  # shellcheck disable=SC2034 # the calling script reads it
  parsed=$((_total - $#))
}

# refuse_arguments ARGUMENTS..: fails if there are any.
refuse_arguments() {
  (($# == 0)) || fail "$1: unexpected argument; --help lists the flags"
}

# positive --flag VALUE: fails if VALUE is not a whole number from 1.
positive() {
  [[ $2 =~ ^[1-9][0-9]{0,5}$ ]] || fail "$1=$2: must be a whole number from 1"
}

# Prints the commit that runs, with +changes if the tree differs from it; nothing where git knows no commit.
commit() {
  local hash=${PROPE_COMMIT:-}
  if [[ -z $hash && -e $ROOT/.git ]] && hash=$(git -C "$ROOT" rev-parse HEAD 2>/dev/null); then
    [[ -z $(git -C "$ROOT" status --porcelain) ]] || hash+=+changes
  fi
  echo "$hash"
}

# final CODE: succeeds if a run that ended with CODE is not restarted.
final() {
  [[ $1 =~ ^(0|1|2|130)$ ]]
}

# decide CODE..: prints the exit code of a run from those of its processes: 2, 1, 130, 75 or 76 first, in this order.
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

# Prints the arguments as one line that a shell reads back as the same arguments.
quoted() {
  local line
  printf -v line '%q ' "$@"
  echo "${line% }"
}

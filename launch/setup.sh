# shellcheck shell=bash
# Sourced by the other scripts: makes .venv beside the code, with the pinned versions, and activates it.
#   source launch/setup.sh [extra]     extra: test, tpu, gpu or hf; none by default
# A second call with nothing changed costs milliseconds. PYTHON names the interpreter; without it the first of
# python3, python3.13, python3.12 and python3.11 that is new enough is taken.

prope_setup() {
  local extra=$1 python wanted stamp
  wanted="$(cat pyproject.toml launch/constraints.txt | cksum) $extra"
  stamp=".venv/installed${extra:+-$extra}"
  if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
    if [[ ! -x .venv/bin/python ]]; then
      for python in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
          break
        fi
        python=
      done
      if [[ -z $python ]]; then
        echo "error: no Python >= 3.11 with venv and pip found; install one, or name it: PYTHON=/path/to/python3" >&2
        return 1
      fi
      "$python" -m venv .venv
    fi
    echo "installing the pinned versions into .venv (about a minute; once)" >&2
    PIP_CONSTRAINT=launch/constraints.txt .venv/bin/python -m pip install --quiet --disable-pip-version-check \
      --editable ".${extra:+[$extra]}"
    echo "$wanted" >"$stamp"
  fi
  # shellcheck source=/dev/null
  source .venv/bin/activate
}

prope_setup "${1:-}"

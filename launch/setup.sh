# shellcheck shell=bash
# Creates .venv in the clone, installs the pinned versions and activates it; source it from the clone's folder.
#   source launch/setup.sh [EXTRA]
#   EXTRA   test, tpu, gpu, plan-gpu, gcs, tensorboard, wandb, hf, gguf, engines or real, or "" for none; by default PROPE_EXTRA or,
#           where that is not set, gpu where nvidia-smi lists a GPU whose driver CUDA 13 accepts, tpu on a TPU VM, else none
# If nothing has changed a second call takes milliseconds. PYTHON names the interpreter; by default it is the first of
# python3, python3.13, python3.12 and python3.11 that is new enough.

# Sets `extra` to what this machine needs, and says so in a line. TPUs are known by their PCI ids, as in JAX.
prope_choose_extra() {
  local gpus driver device ids='0x(0027|0056|005e|0062|0063|006f|0076)' chips=0
  gpus=$(timeout 20 nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || true
  while read -r device; do
    device=/sys/bus/pci/devices/$device
    if [[ $(<"$device/vendor") == 0x1ae0 && $(<"$device/device") =~ ^$ids$ ]]; then
      chips=$((chips + 1))
    fi
  done < <(ls /sys/bus/pci/devices 2>/dev/null)
  if ((gpus)); then
    driver=$(timeout 20 nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || true
    if [[ $driver =~ ^[0-9]+\. ]] && ((${driver%%.*} < 580)); then
      echo "no extra: the driver $driver of the GPU is older than 580, which CUDA 13 needs" >&2
      return
    fi
    extra=gpu
    echo "the extra gpu, as nvidia-smi lists $gpus GPU$( ((gpus == 1)) || echo s); for none: source launch/setup.sh \"\"" >&2
  elif ((chips)); then
    extra=tpu
    echo "the extra tpu, as this machine has $chips TPU chip$( ((chips == 1)) || echo s); for none: source launch/setup.sh \"\"" >&2
  fi
}

prope_setup() {
  local extra=${1-${PROPE_EXTRA-}} python wanted stamp candidates pip what
  if [[ $extra == --help || $extra == -h ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]:-launch/setup.sh}"
    return
  elif (($# > 1)); then
    echo "error: $2: unexpected argument; give one of test, tpu, gpu, plan-gpu, gcs, tensorboard, wandb, hf, gguf, engines, real, or nothing" >&2
    return 2
  elif [[ ! $extra =~ ^(test|tpu|gpu|plan-gpu|gcs|tensorboard|wandb|hf|gguf|engines|real|)$ ]]; then
    echo "error: $extra: there is no such extra; give one of test, tpu, gpu, plan-gpu, gcs, tensorboard, wandb, hf, gguf, engines, real, or nothing" >&2
    return 2
  elif [[ ! -f launch/constraints.txt ]]; then
    echo "error: $PWD: is not the folder of a clone of prope; go there, then: source launch/setup.sh" >&2
    return 2
  fi
  (($# > 0)) || [[ -n ${PROPE_EXTRA+set} ]] || prope_choose_extra
  wanted="$(cat pyproject.toml launch/constraints.txt | cksum) $extra"
  stamp=".venv/installed${extra:+-$extra}"
  if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
    if [[ ! -x .venv/bin/python ]]; then
      candidates=(python3 python3.13 python3.12 python3.11)
      [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
      for python in "${candidates[@]}"; do
        if "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
          break
        fi
        python=
      done
      if [[ -z $python && $extra =~ ^(tpu|gpu|gcs)$ ]]; then # images of machines in clouds may have Python 3.10 only
        python3 -m pip install --quiet --user uv && python3 -m uv python install --quiet 3.11 &&
          python=$(python3 -m uv python find 3.11) || return
      fi
      if [[ -z $python ]]; then
        echo "error: no Python >= 3.11 with venv and pip found; install one, or name it: PYTHON=/path/to/python3" >&2
        return 1
      fi
      "$python" -m venv .venv || return
    fi
    echo "installing the pinned versions into .venv (about half a minute; once)" >&2
    # uv takes a quarter of pip's time, but does not read pip's settings: where it fails, pip installs.
    pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
    what=(--constraint launch/constraints.txt --editable ".${extra:+[$extra]}")
    {
      "${pip[@]}" --constraint launch/constraints.txt uv &&
        UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}} .venv/bin/python -m uv pip install --quiet \
          --python .venv/bin/python "${what[@]}"
    } 2>/dev/null || "${pip[@]}" "${what[@]}" || return
    echo "$wanted" >"$stamp"
  fi
  # shellcheck source=/dev/null
  source .venv/bin/activate
}

prope_setup "$@"

#!/usr/bin/env bash
# All that only a GPU can show, in the order of its worth, within 15 minutes: versions, correctness, milliseconds by
# class of kernel, variants of the step, rotation, documents, the same beside transformers.
#   bash tests/on_gpu.sh OUT [CONFIGS' SIZE]
#   bash tests/on_gpu.sh runs/gpu          # on one GPU
#   bash tests/on_gpu.sh runs/gpu tiny     # on any machine: the same programs on tiny models
# OUT gets a NAME.json and a NAME.log of every part. A part that fails, or is too slow, does not stop those after it; the
# exit code is 1 then.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
(($#)) || { echo "error: no folder for the results: bash tests/on_gpu.sh OUT" >&2; exit 2; }
mkdir -p "$1" && out=$(realpath "$1")
size=${2:+:$2}
models=(2b 300m smollm2) steps=5 rows=4 length=2048 tokens=1024 shape=4,8192,8,256 some=()
[[ -z $size ]] || { models=(2b) steps=1 rows=1 length=128 tokens=128 shape=1,256,2,64 some=(--variant="documents by plain XLA"); }
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
failed=()

part() { # NAME SECONDS COMMAND..; fewer seconds where less than that is left of 15 minutes
  local name=$1 start=$SECONDS code=0
  local limit=$(($2 < 900 - SECONDS ? $2 : 900 - SECONDS))
  timeout "$((limit > 1 ? limit : 1))" "${@:3}" >"$out/$name.json" 2>"$out/$name.log" || { code=$? && failed+=("$name"); }
  echo "$name: exit code $code after $((SECONDS - start)) s"
}

declare -A configs=([2b]=gemma_2b_wiki [300m]=gemma_300m_wiki [smollm2]=smollm2_135m)
choose() { # MODEL; sets `config`, the flags that name its step
  config=(--config=configs/"${configs[$1]}".py"$size")
  [[ $1 != 2b ]] || config+=(--config.batch_size=1 --config.accumulation=1)
}
bench=(python -m prope.bench --steps="$steps")

nvidia-smi >"$out/nvidia_smi.txt" 2>&1 || true
part versions 60 python -c 'import jax; print(jax.__version__, jax.devices()[0].device_kind, jax.print_environment_info(True))'
part correctness 200 python tests/on_gpu.py "$tokens"
for model in "${models[@]}"; do
  choose "$model"
  part "profile_$model" 90 "${bench[@]}" --profile "${config[@]}"
done
for model in "${models[@]}"; do
  choose "$model"
  part "variants_$model" 180 python tests/gpu_variants.py --steps="$steps" "${some[@]}" "${config[@]}"
done
part rotation 60 "${bench[@]}" --rope --shape="$shape" --dtype=bfloat16
part rotation_float32 60 "${bench[@]}" --rope --shape="$shape"
choose smollm2
untrained=(--config.data.dataset=python_docs --config.data.tokenizer=byte --config.num_steps=1 --config.eval.max_windows=1)
part untrained 90 python -m prope.train "${config[@]}" "${untrained[@]}" --config.batch_size=2 --workdir="$out/untrained"
if python -c 'import torch, transformers' 2>/dev/null; then
  XLA_PYTHON_CLIENT_MEM_FRACTION=0.45 part beside_transformers 120 \
    python tests/beside_transformers.py "$out/untrained" --sequences="$rows" --seq_len="$length" --rounds="$steps"
else
  echo "beside_transformers: left out; torch and transformers are not installed"
fi
((${#failed[@]} == 0)) || { echo "failed: ${failed[*]}" >&2; exit 1; }

#!/usr/bin/env bash
# All that only a GPU can show, in the order of its worth, within 15 minutes: versions, correctness, milliseconds by
# class of kernel, variants of the step, rotation, documents, the same beside transformers.
#   bash tests/on_gpu.sh OUT [CONFIGS' SIZE]
#   bash tests/on_gpu.sh runs/gpu          # on one GPU
#   bash tests/on_gpu.sh runs/gpu tiny     # on any machine: the same programs on tiny models
# OUT gets a NAME.json and a NAME.log of every part. A part that fails, or is too slow, does not stop those after it; the
# exit code is 1 then.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
(($#)) || { echo "error: no folder for the results: bash tests/on_gpu.sh OUT" >&2; exit 2; }
mkdir -p "$1" && out=$(realpath "$1")
size=${2:+:$2}
steps=5 rows=4 length=2048 tokens=1024 shape=4,8192,8,256
some=()
[[ -z $size ]] || { steps=1 rows=1 length=128 tokens=128 shape=1,256,2,64 some=(--variant=documents); }
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
failed=()

part() { # NAME SECONDS COMMAND..
  local name=$1 start=$SECONDS code=0
  timeout "$2" "${@:3}" >"$out/$name.json" 2>"$out/$name.log" || { code=$? && failed+=("$name"); }
  echo "$name: exit code $code after $((SECONDS - start)) s"
}

gemma_2b=(--config=configs/gemma_2b_wiki.py"$size" --config.batch_size=1 --config.accumulation=1)
gemma_300m=(--config=configs/gemma_300m_wiki.py"$size")
smollm2=(--config=configs/smollm2_135m.py"$size")
bench=(python -m prope.bench --steps="$steps")
variants=(python tests/gpu_variants.py --steps="$steps" "${some[@]}")

nvidia-smi >"$out/nvidia_smi.txt" 2>&1 || true
part versions 60 python -c 'import jax; print(jax.__version__, jax.devices()[0].device_kind, jax.print_environment_info(True))'
part correctness 200 python tests/on_gpu.py "$tokens"
# Kernels inside CUDA graphs have no name of their instruction.
export XLA_FLAGS="--xla_gpu_enable_command_buffer= ${XLA_FLAGS:-}"
part profile_2b 90 "${bench[@]}" --profile "${gemma_2b[@]}"
part profile_300m 90 "${bench[@]}" --profile "${gemma_300m[@]}"
part profile_smollm2 90 "${bench[@]}" --profile "${smollm2[@]}"
export XLA_FLAGS=${XLA_FLAGS#--xla_gpu_enable_command_buffer= }
part variants_2b 180 "${variants[@]}" "${gemma_2b[@]}"
part variants_300m 180 "${variants[@]}" "${gemma_300m[@]}"
part variants_smollm2 180 "${variants[@]}" "${smollm2[@]}"
part rotation 60 "${bench[@]}" --rope --shape="$shape" --dtype=bfloat16
part rotation_float32 60 "${bench[@]}" --rope --shape="$shape"
untrained=(--config.data.dataset=python_docs --config.data.tokenizer=byte --config.num_steps=1 --config.eval.max_windows=1)
part untrained 90 python -m prope.train "${smollm2[@]}" "${untrained[@]}" --config.batch_size=2 --workdir="$out/untrained"
if python -c 'import torch, transformers' 2>/dev/null; then
  XLA_PYTHON_CLIENT_MEM_FRACTION=0.45 part beside_transformers 120 \
    python tests/beside_transformers.py "$out/untrained" --sequences="$rows" --seq_len="$length" --rounds="$steps"
else
  echo "beside_transformers: left out; torch and transformers are not installed"
fi
((${#failed[@]} == 0)) || { echo "failed: ${failed[*]}" >&2; exit 1; }

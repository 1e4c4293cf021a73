#!/usr/bin/env bash
# Evaluates a published model with pairs chosen by several rules: the records of
# configs/results/which_pairs.md. Evaluations that are there already are not made again.
#
#   bash configs/results/which_pairs.sh MODEL DATA WORK [PART ..]
#
# MODEL is a folder of transformers, DATA the folder of wikipedia/20230601.en, WORK a new folder.
# One half of the articles chooses, the other is evaluated, with Python's library as a second kind
# of text. Two CPU cores need 1.5 minutes for SmolLM2 135M on 30,720 tokens, with 31 of these in all,
# and Gemma 3 270M twice as long. PROPE_WINDOWS and PROPE_LONG_WINDOWS are numbers of windows.
set -euo pipefail
(($# >= 3)) || { sed -n '/^#!/d; s/^# \{0,1\}//p' "$0" >&2; exit 2; }
model=$1 data=$2 work=$3
windows=${PROPE_WINDOWS:-30} long_count=${PROPE_LONG_WINDOWS:-6}
mkdir -p "$work/text"

python - "$data" "$work/text" <<'PYTHON'
import hashlib, json, pathlib, sys
import tensorflow_datasets as tfds
articles = list(tfds.data_source("wikipedia/20230601.en", split="train", data_dir=sys.argv[1]))
articles.sort(key=lambda article: hashlib.sha256(article["title"]).digest())
for name, half in (("train", articles[:53]), ("validation", articles[53:])):
    lines = [json.dumps({"text": article["text"].decode()}) + "\n" for article in half]
    pathlib.Path(sys.argv[2], f"{name}.jsonl").write_text("".join(lines))
PYTHON

short=$work/short long=$work/long
for run in "$short" "$long"; do # choices at 1024 and at 8192 tokens
  [[ -f $run/config.json ]] || python -m prope.import_hf --input="$model" --workdir="$run" --dtype=float32
done
text=(--dataset=files "--data_dir=$work/text")
at_1024=(--seq_len=1024 "--max_windows=$windows")
at_8192=(--seq_len=8192 "--max_windows=$long_count")

choose() { python -m prope.choose --workdir="$1" "${text[@]}" "${@:2}"; }

articles() { choose "$short" "${at_1024[@]}" --rule=change,norm,fast --keep=0.5,0.25,0.125; }
source_code() {
  for pairs in "" "$short"/pairs_{change,norm,fast}_head_{0.5,0.25}.json; do
    python -m prope.evaluate --workdir="$short" --dataset=python_source --split=all "${at_1024[@]}" ${pairs:+"--pairs=$pairs"}
  done
}
long_windows() { # by choices at this length, and by that at 1024 tokens
  choose "$long" "${at_8192[@]}" --sequences=8 --rule=change,norm,fast --keep=0.5
  python -m prope.evaluate --workdir="$long" "${text[@]}" --split=validation "${at_8192[@]}" --pairs="$short/pairs_change_head_0.5.json"
}
budgets() { choose "$short" "${at_1024[@]}" --per=model,layer --keep=0.5,0.25,0.125; }
amounts() { # articles that choose, instead of 16; and files of Python's library
  for count in 1 4 53; do choose "$short" "${at_1024[@]}" "--output=$work/articles_$count" --sequences=$count --keep=0.5; done
  python -m prope.choose --workdir="$short" --seq_len=1024 --max_windows=1 "--output=$work/source" --dataset=python_source --keep=0.5
  python -m prope.evaluate --workdir="$short" "${text[@]}" --split=validation "${at_1024[@]}" "--pairs=$work/source/pairs.json"
}
controls() { choose "$short" "${at_1024[@]}" --rule=slow,uniform --keep=0.5; }
training() { # what 200 steps add, in three orders of the text; the fastest are p-RoPE, the control all pairs
  local run=$work/training/as_it_is seed name
  train() { # NAME OVERRIDES
    python -m prope.train --config=configs/conversion_smollm2.py "--workdir=$work/training/$1,seed=$seed" "--init_from=$run" \
      "--config.data.tokenizer=$run/tokenizer" "--config.data.data_dir=$data" "--config.seed=$seed" --config.model.scan_layers=True "${@:2}"
  }
  [[ -f $run/config.json ]] || python -m prope.import_hf --input="$model" --workdir="$run" --dtype=bfloat16
  choose "$run" --dataset=wikipedia/20230601.en "--data_dir=$data" --seq_len=1024 --max_windows=1 --rule=change,norm --keep=0.5,0.25
  for seed in 0 1 2; do
    train control
    for name in change_0.5 change_0.25 norm_0.5 norm_0.25; do
      train "$name" "--config.model.rope_pairs=$run/pairs_${name/_/_head_}.json"
    done
    for name in 0.5 0.25; do train "fast_$name" "--config.model.rope_percentage=$name"; done
    train p_0 --config.model.rope_percentage=0
  done
}

parts=("${@:4}")
((${#parts[@]})) || parts=(articles source_code long_windows budgets amounts controls)
for part in "${parts[@]}"; do "$part"; done

"""Asks an engine in a process of its own, which it may abort; without prope, for a quick start.

python -P engine_process.py ENGINE EXPORT QUESTIONS ANSWERS
"""

import json
import os
import pathlib
import sys
import urllib.request

import numpy as np

_NUM_COMPARED = 1000  # likeliest tokens after a prompt


def _list_likeliest(logits, texts: list[str], tokenizer) -> dict[str, list]:
    """Returns the answer by logits [V] after every prompt, and a tokenizer of transformers."""
    answers = {"tokens": [], "scores": []}
    for values in np.asarray(logits, np.float64):
        likeliest = np.argsort(-values)[:_NUM_COMPARED]
        total = np.log(np.exp(values - values.max()).sum()) + values.max()
        answers["tokens"].append(likeliest.tolist())
        answers["scores"].append((values[likeliest] - total).tolist())
    answers["ids"] = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return answers


def ask_transformers(export: str, prompts: list[list[int]], texts: list[str]) -> dict[str, list]:
    """Answers as `ask_llama_cpp` does; a folder without a tokenizer is asked for no texts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"dtype": torch.float32, "trust_remote_code": True}
    model = AutoModelForCausalLM.from_pretrained(export, **options)
    tokenizer = AutoTokenizer.from_pretrained(export, trust_remote_code=True) if texts else None
    with torch.no_grad():
        logits = [model(torch.tensor([prompt])).logits[0, -1].numpy() for prompt in prompts]
    return _list_likeliest(logits, texts, tokenizer)


def ask_mlx(export: str, prompts: list[list[int]], texts: list[str]) -> dict[str, list]:
    """Answers as `ask_transformers` does."""
    import mlx.core as mx
    from mlx_lm.utils import load_model, load_tokenizer

    folder = pathlib.Path(export)
    model, _ = load_model(folder)
    tokenizer = load_tokenizer(folder) if texts else None
    last = [model(mx.array([prompt]))[0, -1].astype(mx.float32) for prompt in prompts]
    return _list_likeliest([np.array(logits) for logits in last], texts, tokenizer)


def ask_vllm(export: str, prompts: list[list[int]], texts: list[str]) -> dict[str, list]:
    """Answers as `ask_transformers` does."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import LLM, SamplingParams

    vocab_size = json.loads(pathlib.Path(export, "config.json").read_text())["vocab_size"]
    count = min(_NUM_COMPARED, vocab_size)
    options = {"dtype": "float32", "enforce_eager": True, "trust_remote_code": True}
    options |= {"max_model_len": max(map(len, prompts)) + 1, "max_num_seqs": 1}
    model = LLM(export, skip_tokenizer_init=not texts, max_logprobs=count, **options)
    sampling = SamplingParams(max_tokens=1, temperature=0, logprobs=count, detokenize=False)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    answers = {"tokens": [], "scores": [], "ids": []}
    for answer in model.generate(asked, sampling, use_tqdm=False):
        (found,) = answer.outputs[0].logprobs
        answers["tokens"].append(list(found))
        answers["scores"].append([each.logprob for each in found.values()])
    for text in texts:
        answers["ids"].append(model.get_tokenizer().encode(text, add_special_tokens=False))
    return answers


def ask_llama_cpp(export: str, prompts: list[list[int]], texts: list[str]) -> dict[str, list]:
    """Returns the likeliest tokens after prompts, their log-probabilities, and ids of texts."""
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path = export
    options.n_ctx = max(map(len, prompts)) + 64
    options.n_parallel = 1
    options.warmup = False
    options.verbosity = -1
    options.swa_full = True
    exact = xllamacpp.ggml_type.GGML_TYPE_F32
    options.cache_type_k = exact
    options.cache_type_v = exact
    options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(options)
    open_directly = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def post(path, **request):
        headers = {"Content-Type": "application/json"}
        url = f"{server.listening_address}/{path}"
        data = json.dumps(request).encode()
        return json.load(open_directly(urllib.request.Request(url, data, headers)))

    answers = {"tokens": [], "scores": [], "ids": []}
    # Of a token without text, or with a part of a letter, it tells nothing: this one is generated,
    # and scores are those before the bias.
    (letter, *_) = post("tokenize", content="a", add_special=False)["tokens"]
    options = {"n_predict": 1, "n_probs": _NUM_COMPARED, "logit_bias": [[letter, 1e4]]}
    for prompt in prompts:
        answer = post("completion", prompt=prompt, **options)
        top = answer["completion_probabilities"][0]["top_logprobs"]
        answers["tokens"].append([token["id"] for token in top])
        answers["scores"].append([token["logprob"] for token in top])
    for text in texts:
        answers["ids"].append(post("tokenize", content=text, add_special=False)["tokens"])
    return answers


ENGINES = {
    "llama.cpp": ask_llama_cpp,
    "mlx": ask_mlx,
    "transformers": ask_transformers,
    "vllm": ask_vllm,
}

if __name__ == "__main__":
    engine, export, questions, answers = sys.argv[1:]
    result = ENGINES[engine](export, **json.loads(pathlib.Path(questions).read_text()))
    pathlib.Path(answers).write_text(json.dumps(result))
    os._exit(0)  # a server waits for its threads

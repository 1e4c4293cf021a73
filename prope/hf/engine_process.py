"""Asks an engine in a process of its own, which it may abort; without prope, for a quick start.

python -P engine_process.py ENGINE EXPORT QUESTIONS ANSWERS
"""

import json
import os
import pathlib
import sys
import urllib.request

_NUM_COMPARED = 1000  # likeliest tokens after a prompt


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


if __name__ == "__main__":
    engine, export, questions, answers = sys.argv[1:]
    ask = {"llama.cpp": ask_llama_cpp}[engine]
    result = ask(export, **json.loads(pathlib.Path(questions).read_text()))
    pathlib.Path(answers).write_text(json.dumps(result))
    os._exit(0)  # a server waits for its threads

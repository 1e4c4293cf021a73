"""lm-evaluation-harness beside prope.evaluate: the same bits, and what its defaults change."""

import importlib.util
import math
import re

import numpy as np
import oracles
import pytest
from support.commands import ROOT
from support.runs import edit_run, evaluate_run, make_run
from support.text import articles, write_lines

from prope.data.tokenizer import load_tokenizer
from prope.hf import exporter
from prope.workdir.run import open_run

TEXTS = sorted(articles(40), key=len)[:8]
BITS = math.log(2) * sum(len(text.encode()) for text in TEXTS)  # nats of a bit per byte
BOS, EOS = 2, 1


@pytest.fixture(scope="module")
def measured(tmp_path_factory, sentencepiece_model):
    """A folder as the README names it; sums of nats in float64; bits per byte of prope.evaluate.

    The sums are of the texts; of their ends; of what a second <bos> adds; of the documents joined.
    """
    folder = tmp_path_factory.mktemp("lm_eval")
    (folder / "text").mkdir()
    for file in ("held_out.jsonl", "text/held_out.jsonl"):
        write_lines(folder / file, [{"text": text} for text in TEXTS])
    tokenizer = load_tokenizer(sentencepiece_model)
    documents = [[BOS, *tokenizer.encode(text.encode()).tolist(), EOS] for text in TEXTS]
    stream = [token for document in documents for token in document]
    bits = []
    for masked in (True, False):
        run = folder / str(masked)
        make_run(run, 0.75, sentencepiece_model)
        edit_run(run, folder, **{"data.mask_documents": masked})
        (record,) = evaluate_run(run, split="all", seq_len=str(len(stream)))
        bits.append(record["bits_per_byte"])
    exporter.export(folder / "True", folder / "hf")
    run = open_run(folder / "True")
    params = run.params()

    def losses(tokens):
        positions = np.arange(len(tokens))[None]
        logits = oracles.decoder(run.spec.model, params, [tokens], positions)[0, :-1]
        return -np.log(oracles.softmax(logits))[np.arange(len(logits)), tokens[1:]]

    alone = list(map(losses, documents))
    text = sum(each[:-1].sum() for each in alone)
    second = sum(losses([BOS, *document])[:-1].sum() for document in documents) - text
    joined = losses(stream)[np.array(stream[1:]) != BOS].sum()
    return folder, (text, sum(each[-1] for each in alone), second, joined), bits


def test_prope_evaluate_predicts_the_end_and_joins_documents(measured):
    _, (text, end, _, joined), bits = measured
    assert bits == pytest.approx([(text + end) / BITS, joined / BITS], rel=1e-5)


@pytest.mark.skipif(
    not importlib.util.find_spec("lm_eval"),
    reason="lm-eval is not installed: source launch/setup.sh engines",
)
@pytest.mark.filterwarnings("ignore")  # of libraries
@pytest.mark.parametrize("left_out", [(), ("</s>",), ("</s>", '"add_bos_token": False, ')])
def test_lm_eval_computes_the_same_by_the_lines_of_the_readme(measured, monkeypatch, left_out):
    import datasets

    folder, (text, end, second, _), (bits, _) = measured
    monkeypatch.chdir(folder)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
    page = (ROOT / "prope/hf/README.md").read_text()
    (code,) = re.findall(r"^```text\n(from lm_eval .*?)^```", page, re.DOTALL | re.MULTILINE)
    code = code.replace("<eos>", "</s>")
    for part in left_out:
        assert part in code
        code = code.replace(part, "")
    names = {}
    exec(code, names)
    found = names["results"]["bits_per_byte,none"]
    nats = (text + end, text, text + second)[len(left_out)]
    assert found == pytest.approx(nats / BITS, rel=1e-5)
    if not left_out:
        assert found == pytest.approx(bits, rel=1e-5)

"""prope.sample --chat beside transformers' apply_chat_template, and what has no template."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from support.commands import ROOT, refusal
from support.runs import make_run
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from prope.data.chat import encode_chat
from prope.data.tokenizer import load_tokenizer
from prope.hf import exporter, importer
from prope.inference import generation
from prope.inference.generation import Sampling
from prope.workdir.run import open_run

# Templates with what those of published models do: trimming, tests of roles, dates, cut reasoning.
GEMMA = """{{ bos_token }}{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("roles must alternate") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + message['content'] | trim }}{{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") if strftime_now is defined else "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if tools is not none %}{{- tools | tojson }}{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
CHATML = """{% for message in messages %}{% if loop.first %}{{ '<|im_start|>system
Be brief.<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
QWEN = """{%- set ns = namespace(last=0) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" %}
        {%- set ns.last = messages | length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set text = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" and loop.index0 < ns.last %}
        {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
SMOLLM3 = """{% for message in messages %}
{% if message.role == 'assistant' %}
{% generation %}
<|im_start|>assistant
{{ message.content }}<|im_end|>
{% endgeneration %}
{% else %}
<|im_start|>{{ message.role }} {{ {"text": message.content, "<": 1} | tojson(indent=1) }}<|im_end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""
CHAT_MARKS = ["<|im_start|>", "<|im_end|>"]
HEADERS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
# Template, special tokens that it writes, its <bos>, whether a file of its own holds it.
FAMILIES = {
    "Gemma 3": (GEMMA, ["<start_of_turn>", "<end_of_turn>"], "<bos>", True),
    "Llama 3": (LLAMA, HEADERS, {"__type": "AddedToken", "content": "<|begin_of_text|>"}, False),
    "SmolLM2": (CHATML, CHAT_MARKS, None, False),
    "Qwen3": (QWEN, CHAT_MARKS, None, True),
    "SmolLM3": (SMOLLM3, CHAT_MARKS, None, True),
}
TURNS = [
    "  What <is> “p-RoPE”?\n",
    "<think>\nhm\n</think>\n\nAn encoding.",
    "Of what?",
    "Yes.",
    "A",
]


def write(folder, template, marks, bos, in_file=True):
    """Writes a byte-level tokenizer and its template."""
    begin = bos["content"] if isinstance(bos, dict) else bos
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name) for name in ["<end>", *marks, begin] if name])
    tokenizer.add_tokens([AddedToken(name) for name in ("<think>", "</think>", "\n\n")])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    values |= {"bos_token": bos, "add_bos_token": bool(bos)}
    if in_file and template:
        (folder / "chat_template.jinja").write_text(template)
    elif template:
        values["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return tokenizer


@pytest.fixture(scope="module", params=FAMILIES)
def chat(request, tmp_path_factory):
    """(folder, the library's tokenizer, special tokens that the template writes, its <bos>)."""
    folder = tmp_path_factory.mktemp("chat")
    template, marks, bos, in_file = FAMILIES[request.param]
    bare = bos["content"] if isinstance(bos, dict) else bos
    return folder, write(folder, template, marks, bos, in_file), marks, bare


def test_ids_are_those_of_transformers(libraries, chat):
    """One <bos> at most, at the start; and a prompt that is not a chat still spells its tokens."""
    folder, tokenizer, marks, bos = chat
    ours = load_tokenizer(str(folder))
    theirs = libraries[0].AutoTokenizer.from_pretrained(folder)
    for count in (1, 3, 5):
        ids = encode_chat(str(folder), ours, TURNS[:count])
        roles = ["user", "assistant"] * count
        messages = [{"role": r, "content": t} for r, t in zip(roles, TURNS[:count], strict=False)]
        assert ids == theirs.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert ids.count(tokenizer.token_to_id(marks[0])) > count
        assert ids.count(tokenizer.token_to_id(bos or "<end>")) == bool(bos)
        assert not bos or ids[0] == tokenizer.token_to_id(bos)
    assert tokenizer.token_to_id(marks[0]) not in ours.encode(marks[0].encode())


def test_a_chat_goes_on_up_to_an_empty_message(chat, tmp_path, monkeypatch, caplog):
    """Answers end at the end of a turn, and the run's own template goes from import to export."""
    folder, tokenizer, marks, bos = chat
    make_run(tmp_path / "run", tokenizer=folder)
    exporter.export(tmp_path / "run", tmp_path / "hf")
    importer.import_run(tmp_path / "hf", tmp_path / "W")
    name = open_run(tmp_path / "W").spec.data.tokenizer
    assert name == str(tmp_path / "W/tokenizer")
    ends = {tokenizer.token_to_id(mark) for mark in ["<end>", *marks, *([bos] if bos else [])]}
    written = [*TURNS[1::2], "!"]
    answers = [tokenizer.encode(turn, add_special_tokens=False).ids for turn in written]
    asked = []

    def generate(spec, sampling, params, rows, seed):
        asked.extend(rows)
        assert set(sampling.stop_ids) == ends
        row = [*answers[len(asked) - 1], tokenizer.token_to_id(marks[-1]), 7]
        return np.array([row]), {"prefill": 1.0, "decode": 1.0, "compile": 1.0}

    monkeypatch.setattr(generation, "generate", generate)
    messages = iter([TURNS[2], TURNS[4], ""])
    result = generation.continue_prompts(
        str(tmp_path / "W"), None, TURNS[:1], Sampling(9), 0, "chat", ask=lambda: next(messages)
    )
    ours = load_tokenizer(name)
    assert asked == [encode_chat(str(folder), ours, TURNS[:count]) for count in (1, 3, 5)]
    assert (result["prompts"], result["texts"], result["tokens"]) == (["A"], ["!"], 2)
    assert result["start"] == "the chat template"


@pytest.mark.slow
def test_messages_are_read_from_stdin(tmp_path):
    write(tmp_path / "files", GEMMA, ["<start_of_turn>", "<end_of_turn>"], "<bos>")
    make_run(tmp_path / "run", tokenizer=tmp_path / "files")
    command = [sys.executable, "-m", "prope.sample", f"--workdir={tmp_path}/run", "--length=3"]
    for words, text, code in (("", "a\nb\n\nc\n", 0), ("", "", 2), ("--start=none", "a\n", 2)):
        done = subprocess.run(
            [*command, "--chat", *words.split()],
            input=text,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stderr
        if code:
            assert "error: --" in done.stderr.splitlines()[-1]
        else:
            assert json.loads(done.stdout)["prompts"] == ["b"]


@pytest.mark.parametrize(
    ("template", "named"),
    [
        (None, "chat_template"),
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{% if %}", "Expected an expression"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_a_template_that_cannot_be_used_is_one_line(tmp_path, template, named):
    write(tmp_path, template, [], "<bos>")
    ours = load_tokenizer(str(tmp_path))
    line = refusal(encode_chat, str(tmp_path), ours, ["a"])
    assert line.startswith(f"config.data.tokenizer={tmp_path}: ") and named in line
    assert "--chat" in line


def test_a_run_of_bytes_has_no_template(tmp_path, monkeypatch):
    write(tmp_path, CHATML, CHAT_MARKS, None)  # here, but not the run's
    monkeypatch.chdir(tmp_path)
    line = refusal(encode_chat, "byte", load_tokenizer("byte"), ["a"])
    assert line.startswith("config.data.tokenizer=byte: ")

"""Text from a function of the user's own: the batches of a folder with it; what is refused."""

import hashlib
import sys
import textwrap

import numpy as np
import pytest
from support.commands import CONFIG, refusal
from support.text import articles, data_config, documents_of, write_lines

from prope.data.mixture import open_windows
from prope.data.store.build import open_store
from prope.data.windows import train_batch


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes lines of a module of the user's own into the working directory; returns its file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    write_lines(tmp_path / "articles.json", [articles(60)])

    def write(*lines: str, name="own_text"):
        sys.modules.pop(name, None)
        start = "import json, pathlib\n"
        start += "texts = json.loads(pathlib.Path('articles.json').read_text())\n"
        (tmp_path / f"{name}.py").write_text(start + "\n".join(map(textwrap.dedent, lines)))
        return tmp_path / f"{name}.py"

    yield write
    sys.modules.pop("own_text", None)


def documents(body: str, name: str = "documents") -> str:
    return f"def {name}():\n{textwrap.indent(textwrap.dedent(body), '    ')}\n"


def test_a_function_gives_the_batches_of_a_folder_with_its_texts(tmp_path, module):
    (tmp_path / "folder").mkdir()
    write_lines(tmp_path / "folder" / "a.jsonl", [{"text": text} for text in articles(60)])
    named = documents("return [(text, {'id': 1}) for text in texts] + [None, '']", "named")
    file = module(documents("yield from texts"), named)
    folder = data_config(tmp_path, "files", tmp_path / "folder", seq_len=64)
    expected = open_windows(folder, 260, "train")
    for name in ("documents", "named"):
        data = data_config(tmp_path, f"own_text:{name}", seq_len=64)
        windows = open_windows(data, 260, "train")
        for split in ("train", "validation"):
            assert documents_of(windows.store, split) == documents_of(expected.store, split)
        own, of_folder = (train_batch(each, 3, 4, 5) for each in (windows, expected))
        for field, values in of_folder.items():
            np.testing.assert_array_equal(own[field], values)
        source = windows.store.index["rule"]["source"]
        assert source["module"] == hashlib.sha256(file.read_bytes()).hexdigest()
    before = open_store(data, 260).fingerprint
    module(documents("yield from texts"), named, "# another line")
    assert open_store(data, 260).fingerprint != before


@pytest.mark.parametrize(
    ("body", "mentions"),
    [
        ("yield from texts[:9]\nraise ValueError('a\\nb')", "row 10 after row 9: ValueError: a ("),
        ("yield 'a', 'page 7'\nyield 1 / 0", "row 2 after row 1 (page 7): ZeroDivisionError"),
        ("yield from texts * 90\n1 / 0", "row 5401 after row 5400: ZeroDivisionError"),
        ("return texts[0]", "returned a str"),
        ("pass", "returned a NoneType"),
        ("yield b'a'", "own_text:documents row 1: a value of type bytes"),
        ("yield ('a', 1, 2)", "row 1: a value of type tuple"),
        ("yield 'a'\nyield 'b\\ud800', 'page\\n8'", "row 2 (page 8): holds half a character"),
        ("yield from ()", "has no document with text"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_used(tmp_path, module, body, mentions):
    module(documents(body))
    data = data_config(tmp_path, "own_text:documents")
    assert mentions in refusal(open_store, data, 260)
    assert not list(tmp_path.rglob("index.json"))


@pytest.mark.parametrize(
    ("dataset", "mentions"),
    [
        ("no_text:documents", "there is no module no_text; put its file into {root}"),
        ("own_text.py:documents", "there is no module own_text.py; "),
        ("own_text:document", "no function document (did you mean documents?)"),
        ("own_text:texts", "own_text has no function texts"),
        ("needs:f", "ModuleNotFoundError: No module named 'absent' (needs.py line 3)"),
        ("wrong:f", "wrong cannot be imported: SyntaxError: "),
        ("itertools:count", "has no .py file"),
    ],
)  # fmt: skip
def test_functions_that_are_not_there(tmp_path, module, dataset, mentions):
    module(documents("yield from texts"))
    module("import absent", name="needs")
    module("def f(:", name="wrong")
    line = refusal(open_store, data_config(tmp_path, dataset), 260)
    assert line.startswith(f"config.data.dataset={dataset}: ")
    assert mentions.format(root=tmp_path) in line


def test_a_command_finds_the_module_in_its_folder(tmp_path, module, run_command, monkeypatch):
    module(documents("yield from texts"))
    command = [CONFIG, "--config.data.dataset=own_text:documents"]
    done = run_command("prope.data.prepare", *command)
    assert done.code == 0 and done.result["documents"] == 60, done.stderr
    bad = run_command("prope.train", *command, "--workdir=run", "--config.data.template={a}")
    assert bad.code == 2 and "config.data.template={a}: has no effect" in bad.error
    assert not (tmp_path / "run").exists()

"""Local paths and URLs alike; the URLs are on a real server of Cloud Storage's protocol."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import tensorstore as ts
from etils import epath

from prope.runtime import files
from prope.runtime.files import (
    append_jsonl,
    files_below,
    kvstore,
    local_copy,
    new_directory,
    read_json,
    write_atomic,
)


@pytest.fixture(params=["local", "url"])
def place(request, tmp_path):
    return epath.Path(tmp_path if request.param == "local" else request.getfixturevalue("bucket"))


def test_a_file_is_written_replaced_and_read(place):
    write_atomic(place / "a.json", '{"a": 1}')
    write_atomic(place / "a.json", '{"a": 2}')
    assert read_json(place / "a.json", "remedy") == {"a": 2}
    assert [path.name for path in place.iterdir()] == ["a.json"]
    assert read_json(place / "b.json", "remedy") is None


def test_what_is_no_file_is_missing_at_once(place, monkeypatch):
    monkeypatch.setattr(files.time, "sleep", lambda seconds: pytest.fail("waited"))
    write_atomic(place / "a", "{}")
    (place / "folder" / "config.json").mkdir(parents=True, exist_ok=True)
    for path in (
        place / "none.json",
        place / "a" / "config.json",
        place / "folder" / "config.json",
    ):
        assert read_json(path, "remedy") is None


def test_a_folder_of_a_kvstore_is_deleted_alone(place):
    for name in ("a", "b", "c"):
        kvstore(place / name).write("x", b"1").result()
    kvstore(place / "b").delete_range(ts.KvStore.KeyRange()).result()
    assert [kvstore(place / name).list().result() for name in ("a", "b", "c")] == [
        [b"x"],
        [],
        [b"x"],
    ]


@pytest.mark.parametrize("end", [b"", b"\r", b"\n", b"\r\n", b"\0"])
def test_any_bytes_are_written(place, end):
    (place / "a").write_bytes(b"\xff" + end)
    assert (place / "a").read_bytes() == b"\xff" + end


def test_lines_are_appended_after_one_that_was_cut_short(place):
    append_jsonl(place / "lines", {"a": 1})
    append_jsonl(place / "lines", {"a": 2}, {"a": 3})
    (place / "lines").write_text((place / "lines").read_text() + '{"a"')
    append_jsonl(place / "lines", {"a": 4})
    assert (place / "lines").read_text() == '{"a": 1}\n{"a": 2}\n{"a": 3}\n{"a"\n{"a": 4}\n'


def test_a_new_directory_is_there_whole_or_not_at_all(place):
    with pytest.raises(KeyError), new_directory("output", place / "new") as folder:
        (folder / "one").write_text("1")
        raise KeyError
    assert not (place / "new").exists()
    with new_directory("output", place / "new") as folder:
        (folder / "below").mkdir()
        (folder / "below" / "two").write_text("2")
        assert not (place / "new").exists()
    assert (place / "new" / "below" / "two").read_text() == "2"


def test_a_local_copy_has_the_same_files(place):
    (place / "folder" / "below").mkdir(parents=True, exist_ok=True)
    (place / "folder" / "one").write_text("1")
    (place / "folder" / "below" / "two").write_text("2")
    with local_copy(place / "folder") as folder:
        assert (folder / "one").read_text() == "1"
        assert (folder / "below" / "two").read_text() == "2"
        assert folder.name == "folder"
        assert pathlib.Path(folder / "one").is_file()  # local
    assert files_below(place / "folder") == {"below/two": 1, "one": 1}
    with local_copy(place / "folder" / "one") as file:
        assert (file.name, pathlib.Path(file).read_text()) == ("one", "1")


def test_two_processes_append_to_one_object(bucket, tmp_path):
    (tmp_path / "appends.py").write_text(
        "import sys\nfrom etils import epath\nfrom prope.runtime.files import append_jsonl\n"
        "for number in range(10):\n    append_jsonl(epath.Path(sys.argv[1]), {'number': number})\n"
    )
    command = [sys.executable, str(tmp_path / "appends.py"), f"{bucket}/lines"]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    for process in [subprocess.Popen(command, env=environment) for _ in range(2)]:
        assert process.wait(120) == 0
    numbers = [
        json.loads(line)["number"]
        for line in epath.Path(f"{bucket}/lines").read_text().splitlines()
    ]
    assert sorted(numbers) == sorted(2 * [*range(10)])

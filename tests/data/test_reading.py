"""Reading documents: storage that fails is not damage; what is missing is named."""

import errno
import os

import pytest
from etils import epath
from support.text import articles, texts_of, write_dataset
from support.text import data_config as settings

from prope.data.sources import tfds
from prope.data.sources.find import find_source
from prope.errors import RunFailed
from prope.runtime import files

Path = type(epath.Path())


def broken(monkeypatch, name, code, times):
    """Has the first reads of the files with this name fail, as where a server is lost."""
    real = Path.open
    left = [times]

    class Broken:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def __getattr__(self, member):
            value = getattr(self.file, member)
            if not member.startswith("read"):
                return value

            def read(*size):
                left[0] -= 1
                if left[0] >= 0:
                    self.file.read(5)  # and is then within a line
                    raise OSError(code, os.strerror(code))
                return value(*size)

            return read

    def opened(path, *arguments, **options):
        file = real(path, *arguments, **options)
        return Broken(file) if path.name.startswith(name) and arguments[0] == "rb" else file

    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(files, "_PAUSES", (0, 0, 0))
    reader = tfds.READERS.copy()
    for kind, read in reader.items():

        def failing(path, *arguments, read=read):
            if left[0] > 0 and name in path:
                raise RuntimeError("what a library makes of it")
            return read(path, *arguments)

        monkeypatch.setitem(tfds.READERS, kind, failing)


def source_of(tmp_path, kind):
    dataset = write_dataset(tmp_path / "data", kind, articles())
    name = "b.jsonl" if kind == "files" else f"wikipedia-train.{kind}-00001"
    return settings(tmp_path, dataset, tmp_path / "data"), name


@pytest.mark.parametrize("kind", ["array_record", "tfrecord", "files"])
def test_storage_that_fails_is_tried_again_and_is_not_damage(tmp_path, monkeypatch, kind):
    data, name = source_of(tmp_path, kind)
    source = find_source(data)
    expected = list(texts_of(source))
    with monkeypatch.context() as patch:
        broken(patch, name, errno.EIO, 2)
        assert list(texts_of(source)) == expected
    for code, says in ((errno.EIO, "Input/output error"), (errno.EACCES, "Permission denied")):
        with monkeypatch.context() as patch:
            broken(patch, name, code, 1000)
            with pytest.raises(
                RunFailed, match=f"{name}.*: cannot be read: {says}; nothing was changed: see to"
            ):
                list(texts_of(source))


def test_a_folder_that_may_not_be_listed_is_not_incomplete(tmp_path, monkeypatch):
    data, _ = source_of(tmp_path, "array_record")
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    monkeypatch.setattr(Path, "iterdir", lambda path: (_ for _ in ()).throw(denied))
    with pytest.raises(
        RunFailed, match="data: cannot be read: Permission denied; nothing was changed"
    ):
        find_source(data)


@pytest.mark.parametrize("below", ["", "a", "a/b c"])
def test_a_folder_that_may_not_be_listed_is_named(tmp_path, monkeypatch, below):
    closed = tmp_path / "data" / below
    closed.mkdir(parents=True)
    scandir = os.scandir

    def scan(path):
        if str(path) == str(closed):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    with pytest.raises(RunFailed, match=f"^{closed}: cannot be read: Permission denied"):
        find_source(settings(tmp_path, "files", tmp_path / "data"))

"""Tables with columns of text: Parquet files, and Arrow files as the library `datasets` saves them.

What is here of a file at a time is a page of each column, or a record batch of an Arrow file.
"""

import contextlib
import errno
import functools
import itertools
import os
from collections.abc import Iterator

from etils import epath

from prope.data.sources.base import Chunk, Document, TextRule, bad_row
from prope.data.sources.remote import local_file
from prope.errors import UsageError, first_line, nearest
from prope.runtime.files import is_url

_ROWS = 64  # that are Python objects at a time


def table_chunks(
    path: epath.Path, name: str, split: str, size: int, limit: int, rule: TextRule
) -> Iterator[Chunk]:
    """Yields chunks of whole row groups, of about `limit` bytes of text.

    A file that is in a bucket or cannot be used is one chunk, of about `size` bytes.
    """
    read = functools.partial(_read, path, rule)
    rows = ()
    if not is_url(path):
        with contextlib.suppress(UsageError), _open(path, rule) as (row_groups, _):
            rows, sizes = zip((0, 0), *row_groups, strict=True)
    if not rows:
        yield Chunk(name, size, read, split=split)
        return
    ends = list(itertools.accumulate(sizes))
    for _, group in itertools.groupby(range(1, len(rows)), lambda number: ends[number] // limit):
        numbers = list(group)
        start, stop = numbers[0] - 1, numbers[-1]
        yield Chunk(
            key=f"{name} from row group {start} to {stop}",
            num_bytes=ends[stop] - ends[start],
            read=functools.partial(read, start, stop, sum(rows[: start + 1])),
            split=split,
        )


def _read(
    path: epath.Path, rule: TextRule, start: int = 0, stop: int | None = None, row: int = 0
) -> Iterator[Document]:
    """Yields the documents of row groups start .. stop - 1, before which there are `row` rows."""
    import pyarrow as pa

    texts = pa.schema([(name, pa.large_binary()) for name in rule.features])
    try:
        with _open(path, rule, start, stop) as (_, batches):
            for batch in batches:
                for values in batch.select(texts.names).cast(texts).to_pylist():
                    row += 1
                    if None in values.values():
                        yield Document(b"")  # which is left out, and counted
                        continue
                    try:
                        yield rule.document(values)
                    except UsageError as error:
                        yield bad_row(f"{path} row {row}", error)
    except UsageError as error:
        yield bad_row(path, error)


@contextlib.contextmanager
def _open(
    path: epath.Path, rule: TextRule, start: int = 0, stop: int | None = None
) -> Iterator[tuple[Iterator, Iterator]]:
    """Opens a table: yields two iterators, of which one may be read.

    They are of (rows, bytes) of all row groups, and of batches of the row groups start .. stop - 1.
    Raises UsageError, with the reason alone, where the file is damaged or has no such columns.
    """
    import pyarrow as pa
    from pyarrow import ipc, parquet

    place = os.fspath(local_file(path))
    try:
        if path.suffix.lower() == ".parquet":
            # A row group may be larger than the memory.
            options = {"buffer_size": 2**20, "pre_buffer": False}
            file = parquet.ParquetFile(place, page_checksum_verification=True, **options)
            _check_columns(file.schema_arrow, rule)
            numbers = range(file.num_row_groups)
            groups = map(file.metadata.row_group, numbers)
            row_groups = ((group.num_rows, group.total_byte_size) for group in groups)
            columns = list(rule.features)
            batches = file.iter_batches(_ROWS, numbers[start:stop], columns, use_threads=False)
        else:
            source = pa.memory_map(place)
            is_stream = source.read(6) != b"ARROW1"
            source.seek(0)
            file = ipc.open_stream(source) if is_stream else ipc.open_file(source)
            _check_columns(file.schema, rule)
            groups = file if is_stream else map(file.get_batch, range(file.num_record_batches))
            row_groups = ((group.num_rows, group.nbytes) for group in groups)
            batches = (
                group.slice(first, _ROWS)
                for group in itertools.islice(groups, start, stop)
                for first in range(0, group.num_rows, _ROWS)
            )
        yield row_groups, batches
    except (pa.ArrowException, OSError) as error:
        if getattr(error, "errno", None) not in (None, errno.EINVAL):  # of the storage
            raise
        problem = f"is damaged or cut short ({first_line(error)})"
        raise UsageError(f"{problem}; copy it again") from None


def _check_columns(schema, rule: TextRule) -> None:
    """Raises UsageError, with the reason alone, where a feature is no column of text."""
    import pyarrow as pa

    for name in rule.features:
        index = schema.get_field_index(name)
        if index < 0:
            problem = f"no column {name!r}{nearest(name, schema.names)}; name it with {rule.option}"
            raise UsageError(f"{problem}: it has {', '.join(map(repr, schema.names))[:200]}")
        kind = schema.field(index).type
        try:
            pa.nulls(0, kind).cast(pa.large_binary())
        except pa.ArrowNotImplementedError:
            problem = f"column {name!r} holds {str(kind)[:100]}, not strings"
            raise UsageError(f"{problem}; name another one with {rule.option}") from None

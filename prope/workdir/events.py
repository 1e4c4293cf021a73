"""Event files of TensorBoard: TFRecords, of which each holds a protocol buffer of the type Event.

The numbers of fields are those of tensorboard/compat/proto/event.proto and summary.proto.
"""

import pathlib
import socket
import struct
import time

from prope.runtime.files import tfrecord_checksum

_START = 1  # of a session: the events of earlier files from this step on are replaced


class EventFile:
    """An event file that is being written."""

    def __init__(self, folder: pathlib.Path, number: int):
        """Opens events.out.tfevents.TIME.HOST.NUMBER in a folder."""
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{number}"
        self._file = (folder / name).open("wb")
        self._write(time.time(), 0, _message(3, b"brain.Event:2"))

    def start_session(self, step: int) -> None:
        """Adds that events of earlier files from `step` on are replaced."""
        self._write(time.time(), step, _message(7, _integer(1, _START)))

    def number(self, wall_time: float, step: int, tag: str, value: float) -> None:
        """Adds a number that was measured at a time, in seconds since the epoch."""
        content = _message(1, tag.encode()) + b"\x15" + struct.pack("<f", value)
        self._write(wall_time, step, _message(5, _message(1, content)))

    def _write(self, wall_time: float, step: int, content: bytes) -> None:
        event = b"\x09" + struct.pack("<d", wall_time) + _integer(2, step) + content
        length = struct.pack("<Q", len(event))
        self._file.write(length + tfrecord_checksum(length) + event + tfrecord_checksum(event))

    def flush(self) -> None:
        """Writes what was added."""
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _message(field: int, content: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(content)) + content


def _integer(field: int, value: int) -> bytes:
    return bytes([field << 3]) + _varint(value)


def _varint(value: int) -> bytes:
    """Encodes a number by seven bits a byte, the lowest first."""
    encoded = b""
    while value > 127:
        encoded += bytes([value & 127 | 128])
        value >>= 7
    return encoded + bytes([value])

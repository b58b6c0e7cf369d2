"""The bytes of a checkpoint, a safetensors file, and how they are written: tensor by tensor.

    8 bytes   N, the length of the header, little-endian
    N bytes   JSON, {"__metadata__":{"sha256":"<64 hex digits>","format":"rlx_optim","manifest":"…"},"w/m":{…},…}, then blanks
    the rest  the tensors one after the other, little-endian, row by row

The digest stands at a fixed place, byte 35, and is taken over the whole file with "0" in place of its own characters. The
safetensors library reads these files. They are not written with it: so the digest is taken in the same pass, tensors are fetched
one at a time (from a GPU, too), the file is the one that is locked and forced to the disk, and nothing need be installed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..spec import Shape

FORMAT = "rlx_optim"
MAX_HEADER = 100_000_000  # the safetensors library's own bound
OPENING = b'{"__metadata__":{"sha256":"'
DIGEST_AT = 8 + len(OPENING)
BLANK = b"0" * 64
CHUNK = 1 << 22
DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"), "F64": np.dtype("<f8"), "BF16": np.dtype("<u2"), "I8": np.dtype("i1"), "U8": np.dtype("u1"),
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}


class CheckpointError(ValueError):
    """What is wrong with a checkpoint, or with the place it should be written to."""


class NotOurs(CheckpointError):
    """Some other safetensors file."""


class Gone(CheckpointError):
    """A file or folder that is not there, or is not any more."""


#: what helps against what a system says
FIXES = {
    errno.ENOSPC: "make room there, or write elsewhere",
    errno.EDQUOT: "make room within the quota, or write elsewhere",
    errno.EROFS: "write elsewhere",
}


@contextlib.contextmanager
def translate_errors(path: Path, what: str) -> Iterator[None]:
    """Turn the system's refusals into ours."""
    try:
        yield
    except OSError as problem:
        fix = f"; {FIXES[problem.errno]}" if problem.errno in FIXES else ""
        kind = Gone if isinstance(problem, FileNotFoundError) else CheckpointError
        raise kind(f"{path}: {what}: {problem.strerror or problem}{fix}") from problem


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of state that is fetched when it is needed. value: what it is in its own library, if that is not NumPy."""

    shape: Shape
    dtype: np.dtype[Any]
    read: Callable[[], np.ndarray]
    value: Any = None

    def native(self) -> Any:
        """The tensor of its own library, else the array."""
        return self.read() if self.value is None else self.value

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def make_tensor(array: np.ndarray) -> Tensor:
    return Tensor(array.shape, array.dtype, lambda: array)


def sort_for_writing(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """As they are written, and each of them fetched once: the wider types first, which keeps every tensor aligned."""
    return sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)


def write(file: BinaryIO, manifest: str, tensors: Mapping[str, Tensor], allow_nan: bool) -> None:
    """Write a checkpoint to a file at its start. Never holds more than one tensor and one chunk."""
    ordered = sort_for_writing(tensors)
    header = _encode_header(manifest, ordered)
    digest = hashlib.sha256()

    def put(data: Any) -> None:
        digest.update(data)
        file.write(data)

    put(len(header).to_bytes(8, "little"))
    put(header)
    for name, each in ordered:
        array = np.ascontiguousarray(each.read(), each.dtype.newbyteorder("<"))
        for piece in _split_chunks(array.reshape(-1).view(np.uint8)):
            refuse_nan(name, piece, array.dtype, allow_nan)
            put(piece.data)
    file.seek(DIGEST_AT)
    file.write(digest.hexdigest().encode())


def _encode_header(manifest: str, tensors: list[tuple[str, Tensor]]) -> bytes:
    start, table = 0, {}
    for name, each in tensors:
        table[name] = {"dtype": CODES[each.dtype], "shape": list(each.shape), "data_offsets": [start, start + each.nbytes]}
        start += each.nbytes
    metadata = {"sha256": BLANK.decode(), "format": FORMAT, "manifest": manifest}
    try:
        text = json.dumps({"__metadata__": metadata, **table}, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as problem:
        raise CheckpointError(f"a name cannot be written as UTF-8: {problem.object[problem.start - 9 : problem.end]!r}") from None
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise CheckpointError(f"a header of {len(text)} bytes is too large: safetensors allows {MAX_HEADER}")
    return text


def _split_chunks(data: np.ndarray) -> Iterator[np.ndarray]:
    return (data[lo : lo + CHUNK] for lo in range(0, data.size, CHUNK))


def refuse_nan(name: str, piece: np.ndarray, dtype: np.dtype[Any], allow_nan: bool) -> None:
    values = piece.view(dtype)
    if dtype == DTYPES["BF16"]:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    if not allow_nan and values.dtype.kind == "f" and np.isnan(values).any():
        parameter, _, slot = name.rpartition("/")
        raise CheckpointError(f"{slot} of {parameter!r} holds NaN; allow_nan=True saves and loads it all the same")

"""Reading a checkpoint: its header, checked, its digest, and its tensors one at a time, all through one open file.

The safetensors library would read it as well, but takes the last of two equal keys, and opens the path anew for the tensors,
which may be another file by then. Here what was verified is what is read, and nothing is made before it is known to be there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np

from ..spec import Shape
from .format import (
    BLANK,
    CHUNK,
    DIGEST_AT,
    DTYPES,
    FORMAT,
    MAX_HEADER,
    OPENING,
    CheckpointError,
    NotOurs,
    Tensor,
    refuse_nan,
    translate_errors,
)


def parse_strict_json(text: str | bytearray, what: str) -> Any:
    """JSON without its loopholes: no key twice, no NaN, no bottomless nesting."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"the key {key!r} stands there twice")
            found[key] = value
        return found

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=constant)
    except RecursionError:
        raise CheckpointError(f"{what} is nested too deeply") from None
    except ValueError as problem:
        raise CheckpointError(f"{what} is damaged: {problem}") from None


@dataclasses.dataclass(frozen=True)
class Span:
    """Where a tensor lies, counted from the end of the header."""

    dtype: np.dtype[Any]
    shape: Shape
    start: int
    stop: int


class Reader:
    """An open checkpoint, its header checked. `verify` checks the rest; until then no tensor should be believed."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        with translate_errors(self.path, "cannot be read"):
            if not stat.S_ISREG(os.stat(self.path).st_mode):  # before it is opened: a pipe would wait for a writer
                raise CheckpointError(f"{self.path}: not a file")
            self._file = io.FileIO(self.path)
            self.size = os.fstat(self._file.fileno()).st_size
        try:
            with self.naming():
                self._open()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Put the file's name before what is wrong with it."""
        try:
            yield
        except CheckpointError as problem:
            message, name = str(problem), f"{self.path}: "
            raise type(problem)(message if message.startswith(name) else name + message) from problem

    def _open(self) -> None:
        if self.size < 8:
            raise CheckpointError(f"not a checkpoint, or cut off: it has only {self.size} bytes")
        length = int.from_bytes(self._bytes(0, 8), "little")
        if length > min(MAX_HEADER, self.size - 8):
            raise CheckpointError(
                f"not a checkpoint, or cut off: it declares a header of {length} bytes; {self.size - 8} follow, "
                f"and {MAX_HEADER} are allowed"
            )
        self.data_at = 8 + length
        raw = self._bytes(8, length)
        header = parse_strict_json(raw, "the header")
        metadata = header.pop("__metadata__", None) if isinstance(header, dict) else None
        if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
            damaged = raw.startswith(OPENING)
            raise (CheckpointError if damaged else NotOurs)("a safetensors file perhaps, but not a sound checkpoint of rlx_optim")
        self.digest, manifest = metadata.get("sha256"), metadata.get("manifest")
        if not isinstance(manifest, str):
            raise CheckpointError("the manifest is missing")
        self.manifest: str = manifest
        if not raw.startswith(OPENING) or raw[len(OPENING) : len(OPENING) + 64] != str(self.digest).encode():
            raise CheckpointError(f"the digest is not where it should be, at byte {DIGEST_AT}")
        self._table = header

    def check_table(self) -> None:
        """Check that the tensors fill the file, one after the other."""
        self.spans = {name: _parse_span(name, entry) for name, entry in self._table.items()}
        end = 0
        for name, span in sorted(self.spans.items(), key=lambda item: (item[1].start, item[1].stop)):
            if span.start != end:
                raise CheckpointError(f"tensor {name!r} begins at {span.start}, but what comes before it ends at {end}")
            end = span.stop
        if self.data_at + end != self.size:
            state = "cut off" if self.data_at + end > self.size else "longer than its header says"
            raise CheckpointError(f"{state}: it has {self.size} bytes, its header accounts for {self.data_at + end}")

    def verify(self, allow_nan: bool) -> None:
        """Read every byte once: the digest must be right, no tensor may hold NaN unless allowed, no scale be below zero."""
        digest = hashlib.sha256(self._bytes(0, DIGEST_AT))
        digest.update(BLANK)
        for start, stop in _chunk_bounds(DIGEST_AT + 64, self.data_at):
            digest.update(self._bytes(start, stop - start))
        problem = None
        for name, span in sorted(self.spans.items(), key=lambda item: item[1].start):
            for start, stop in _chunk_bounds(self.data_at + span.start, self.data_at + span.stop):
                piece = np.frombuffer(self._bytes(start, stop - start), np.uint8)
                digest.update(piece.data)
                try:
                    refuse_nan(name, piece, span.dtype, allow_nan or problem is not None)
                    if self._scales(name) and (piece.view(span.dtype) < 0).any():
                        raise CheckpointError(f"tensor {name!r} has scales below zero")
                except CheckpointError as found:
                    problem = found  # a damaged file is the graver news
        if digest.hexdigest() != self.digest:
            raise CheckpointError("damaged: its bytes do not have the SHA-256 written in it")
        if problem is not None:
            raise problem

    def _scales(self, name: str) -> bool:
        """Whether a tensor holds the scales of another that is codes."""
        codes = self.spans.get(name.removesuffix("_scale")) if name.endswith("_scale") else None
        return codes is not None and codes.dtype.itemsize == 1

    def tensors(self) -> dict[str, Tensor]:
        return {name: self._tensor(span) for name, span in self.spans.items()}

    def _tensor(self, span: Span) -> Tensor:
        def read() -> np.ndarray:
            with self.naming():
                array = np.empty(span.shape, span.dtype)
                self._fill(array.reshape(-1).view(np.uint8), self.data_at + span.start)
            return array.astype(span.dtype.newbyteorder("="), copy=False)

        return Tensor(span.shape, span.dtype, read)

    def _bytes(self, start: int, length: int) -> bytearray:
        block = bytearray(length)
        self._fill(np.frombuffer(block, np.uint8), start)
        return block

    def _fill(self, buffer: np.ndarray, start: int) -> None:
        done = 0
        with translate_errors(self.path, "cannot be read"):
            self._file.seek(start)
            while done < buffer.size:
                got = self._file.readinto(buffer[done:].data)
                if not got:
                    raise CheckpointError(f"cut off while it was read, at byte {start + done}")
                done += got


def _chunk_bounds(start: int, stop: int) -> Iterator[tuple[int, int]]:
    return ((lo, min(lo + CHUNK, stop)) for lo in range(start, stop, CHUNK))


def is_whole_number(value: Any, most: int = 2**53) -> bool:
    """Whether a value of JSON is a whole number from 0 on."""
    return type(value) is int and 0 <= value <= most


def is_shape(value: Any) -> bool:
    """Whether a value of JSON is a list of so many whole numbers as NumPy's arrays may have dimensions."""
    return isinstance(value, list) and len(value) <= 64 and all(map(is_whole_number, value))


def _parse_span(name: str, entry: Any) -> Span:
    what = f"tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{what}: its entry must have dtype, shape and data_offsets")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        raise CheckpointError(f"{what}: its dtype is {entry['dtype']!r}; known are {', '.join(DTYPES)}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not is_shape(shape):
        raise CheckpointError(f"{what}: its shape must be a list of whole numbers, got {shape!r:.80}")
    if not isinstance(offsets, list) or not all(map(is_whole_number, offsets)) or len(offsets) != 2:
        raise CheckpointError(f"{what}: its data_offsets must be two whole numbers, got {offsets!r:.80}")
    dtype = DTYPES[entry["dtype"]]
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(
            f"{what}: shape {tuple(shape)} of {entry['dtype']} does not fill bytes {offsets[0]} to {offsets[1]}"
        )
    return Span(dtype, tuple(shape), offsets[0], offsets[1])

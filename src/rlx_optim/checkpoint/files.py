"""Where checkpoints lie: written so that a crash leaves the old one or the new one, and how the newest good one is found.

A file is written under a name of its own in the same folder, forced to the disk, read back, renamed, and the folder forced to the
disk. While it is written it is locked, so that what a crash left behind can be told from another writer's work and removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .format import CheckpointError, Gone, NotOurs, translate_errors, write
from .manifest import decode, encode, parse_manifest, saved_ns
from .reader import Reader
from .snapshot import Snapshot, check_snapshot

try:
    import fcntl
except ImportError:  # Windows: no locks, so nothing is cleaned up
    fcntl = None  # type: ignore[assignment]

SUFFIX = ".safetensors"
TEMPORARY = ".rlx-tmp"
NUMBER = "{iteration}"
DATE = re.compile(rb'\\"saved_ns\\":(\d{1,19}),')  # JSON within JSON
IN_A_FOLDER = f"checkpoint-{NUMBER}{SUFFIX}"


# ---- one file -----------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def open_checkpoint(path: str | os.PathLike[str], allow_nan: bool = False) -> Iterator[Snapshot]:
    """A checkpoint, verified to the last byte; its tensors can be read while it is open."""
    with Reader(path) as reader, reader.naming():
        try:
            manifest = parse_manifest(reader.manifest)
            reader.check_table()
            reader.verify(allow_nan)
            snapshot = decode(manifest, reader.tensors())
        except RecursionError:
            raise CheckpointError("the manifest is nested too deeply") from None
        yield snapshot


def write_checkpoint(snapshot: Snapshot, path: Path, allow_nan: bool = False) -> None:
    """Write a checkpoint: all of it, or nothing."""
    check_snapshot(snapshot)
    path = Path(os.path.realpath(path))  # a link stays one
    with replace_file(path, lambda name: _read_back(name, path, allow_nan)) as file:
        write(file, encode(snapshot, _find_newest_ns(path)), snapshot.tensors(), allow_nan)


@contextlib.contextmanager
def replace_file(path: Path, look: Callable[[Path], None] = lambda name: None) -> Iterator[BinaryIO]:
    """A file that is at this path once all of it is on the disk, and nowhere if something fails. look: at it, before."""
    path = Path(os.path.realpath(path))
    with translate_errors(path, "cannot be written"):
        if path.is_symlink():  # what realpath could not resolve: a rename would replace the link
            raise CheckpointError(f"{path}: is a link that leads to itself; remove it, or write elsewhere")
        if path.is_dir():
            raise CheckpointError(f"{path}: is a folder")
        if path.exists() and not path.is_file():  # a rename would replace the device or the pipe itself
            raise CheckpointError(f"{path}: is a device or a pipe; give the name of a file")
        remove_leftovers(path.parent)
        with _create_temporary(path) as (file, name):
            yield file
            file.flush()
            os.fsync(file.fileno())
            look(name)
            _close_on_windows(file)
            os.replace(name, path)
        _sync_folder(path.parent)


def _find_newest_ns(path: Path) -> int:
    """The latest date on a checkpoint in a file's folder, from their first bytes alone. A new one must not seem older: clocks go
    back, and those of two machines differ."""
    found = 0
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.name.endswith((SUFFIX, path.suffix)) and entry.is_file():  # a pipe would wait for a writer
                    with open(entry.path, "rb") as file:
                        date = DATE.search(file.read(1024))
                    found = max(found, int(date[1]) if date else 0)
    return min(found, 2**63 - 2)


def _read_back(name: Path, path: Path, allow_nan: bool) -> None:
    try:
        with open_checkpoint(name, allow_nan):
            pass
    except CheckpointError as problem:
        raise CheckpointError(f"{path}: what was written does not read back: {problem}") from problem


@contextlib.contextmanager
def _create_temporary(path: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """A new, locked file beside the one to be written; gone afterwards unless it was renamed."""
    while True:
        name = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}{TEMPORARY}")
        with open(name, "xb") as file:  # the umask says who may read it
            try:
                if _try_lock(file) is not False and os.fstat(file.fileno()).st_nlink:  # nobody took it for a leftover meanwhile
                    yield file, name
                    return
            finally:
                try:
                    _close_on_windows(file)  # what a full disk did not take, it does not take now
                finally:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name)


def _close_on_windows(file: BinaryIO) -> None:
    """Windows renames and removes no file that is open; elsewhere it stays locked until it has its name."""
    if fcntl is None:
        file.close()


def _try_lock(file: Any) -> bool | None:
    """Lock a file unless another holds it; None where there are no locks. A lock ends with its process."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def remove_leftovers(folder: Path) -> None:
    """Remove what writers that died have left, as far as that is possible."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith(".") and name.endswith(TEMPORARY):
                with contextlib.suppress(OSError), open(folder / name, "r+b") as file:
                    if _try_lock(file):
                        os.unlink(folder / name)


def _sync_folder(folder: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows: a rename needs no more
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- many files ---------------------------------------------------------------------------------------------------------
def save(
    take: Callable[[], Snapshot], iteration: int, path: str | os.PathLike[str], every: int, keep: int | None, allow_nan: bool
) -> Path | None:
    """Take and write a checkpoint if the iteration is a multiple of `every`, and remove all but the newest `keep`."""
    for what, value in (("every", every), ("keep", keep)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"save: {what} must be an integer >= 1, got {value!r}")
    if iteration % every:
        return None
    template = _make_template(path)
    if not template.name:
        raise ValueError(f"save: path must name a file or a folder, got {path!r}")
    if keep is not None and NUMBER not in template.name:
        raise ValueError(f"save: keep={keep} needs a folder that is there, or {NUMBER} in the file's name, got {str(path)!r}")
    made = path_of_iteration(path, iteration)
    write_checkpoint(take(), made, allow_nan)
    if keep is not None:
        _rotate(template, made, keep)
    return made


def path_of_iteration(path: str | os.PathLike[str], iteration: int) -> Path:
    """The file that a checkpoint of this iteration is written to."""
    template = _make_template(path)
    return template.with_name(template.name.replace(NUMBER, f"{iteration:08d}"))


def _make_template(path: str | os.PathLike[str]) -> Path:
    folder = os.fspath(path).endswith((os.sep, "/")) or os.path.isdir(path)
    return Path(path) / IN_A_FOLDER if folder else Path(path)


def _list_named(template: Path) -> list[Path]:
    """The files that a template has named."""
    pattern = re.escape(template.name).replace(re.escape(NUMBER), r"\d{8,}")
    with translate_errors(template.parent, "cannot be read"):
        return [template.parent / name for name in os.listdir(template.parent) if re.fullmatch(pattern, name)]


def _rotate(template: Path, newest: Path, keep: int) -> None:
    others = sort_by_age([path for path in _list_named(template) if path.name != newest.name])
    for path in others[keep - 1 :]:
        try:
            path.unlink(missing_ok=True)
        except OSError as problem:
            warnings.warn(f"{path}: an old checkpoint cannot be removed: {problem.strerror}", stacklevel=4)


def sort_by_age(paths: list[Path]) -> list[Path]:
    """The newest first: by the dates in them, which rise in the order of writing, or, where they cannot be read, by the file
    system's word."""

    def saved(path: Path) -> tuple[int, str]:
        try:
            with Reader(path) as reader, reader.naming():
                return saved_ns(parse_manifest(reader.manifest)), path.name
        except NotOurs:
            return -1, path.name
        except CheckpointError:
            with contextlib.suppress(OSError):
                return path.stat().st_mtime_ns, path.name
            return 0, path.name

    times = {path: saved(path) for path in paths}
    return sorted((path for path in paths if times[path][0] >= 0), key=times.__getitem__, reverse=True)


def latest(where: str | os.PathLike[str], allow_nan: bool = False) -> Path:
    """The checkpoint written last, of those that verify: in a folder, or among those named by a path with {iteration} in it.

    A newer one that does not verify is warned about.
    """
    place, before, problems = Path(where), None, list[str]()
    while (candidates := list_candidates(place)) != before:  # a writer may remove old ones as fast as they are read
        before, problems = candidates, []
        for path in sort_by_age(sorted(candidates)):
            try:
                with open_checkpoint(path, allow_nan):
                    return path
            except Gone:
                continue
            except CheckpointError as problem:
                problems.append(str(problem))
                warnings.warn(f"SKIPPED A BAD CHECKPOINT: {problem}", stacklevel=3)
    raise CheckpointError(f"{place}: there is no good checkpoint" + "".join(f"; {problem}" for problem in problems))


def list_candidates(place: Path) -> set[Path]:
    """The files that may be checkpoints: in a folder, or those that a path with {iteration} in it has named."""
    if NUMBER in place.name:
        return set(_list_named(place))
    with translate_errors(place, "cannot be read"):
        return {place / name for name in os.listdir(place) if name.endswith(SUFFIX)}

"""Where compiled code is kept between processes: a folder of ours for all of it, or none at all.

Nothing depends on it: where the folder cannot be written, is full, or has a file that was cut short, code is compiled anew.
"""

# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba

from . import native

_lock = threading.RLock()  # of numba.config.CACHE_DIR


def base() -> Path | None:
    """RLX_OPTIM_CACHE, or the user's cache folder, if there is one."""
    if given := os.environ.get("RLX_OPTIM_CACHE"):
        return Path(given).absolute()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlx_optim"
    except RuntimeError:  # a user without a home
        return None


def cache_folder() -> Path | None:
    """The folder for this Python, this numba and this text of `native`, on which everything rests; None: nothing can be kept."""
    within = base()
    if within is None:
        return None
    digest = hashlib.sha256(Path(native.__file__).read_bytes()).hexdigest()[:8]
    folder = within / f"python{sys.version_info[0]}.{sys.version_info[1]}-numba{numba.__version__}-{digest}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return None


@functools.cache
def _folder() -> Path | None:
    return cache_folder()


def kept(make: Callable[[Path | None], Any]) -> Any:
    """What `make` compiles, given the folder where numba is to keep it; without one where that does not work."""
    folder = _folder()
    if folder is None:
        return make(None)
    try:
        with _kept_in(folder):
            return make(folder)
    except Exception as problem:  # a damaged file can raise anything
        made = make(None)  # if it was not the cache, this says so
        _complain(folder, f"{type(problem).__name__}: {problem}")
        return made


@contextlib.contextmanager
def _kept_in(folder: Path) -> Iterator[None]:
    with _lock:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = before or str(folder)
        try:
            yield
        finally:
            numba.config.CACHE_DIR = before


_told: set[Path] = set()


def _complain(folder: Path, problem: str) -> None:
    if folder not in _told:
        _told.add(folder)
        where = numba.config.CACHE_DIR or folder
        warnings.warn(f"rlx_optim: compiled code cannot be kept ({problem}); clear {where}, or make room there", stacklevel=4)


def compiled(decorator: Callable[..., Any], *signature: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """numba's njit or cfunc with all signatures given, so that it compiles at once, with the cache above."""
    return lambda function: kept(lambda folder: decorator(*signature, cache=folder is not None, **options)(function))

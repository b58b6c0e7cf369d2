"""Where compiled code is kept between processes: a folder of ours for all of it, or none at all.

Nothing depends on it: where the folder cannot be written, is full, or has a file that was cut short, code is compiled anew.
numba's files are pickles: who can write one runs code as the user who loads it. So nothing is loaded from a folder that another
user could change.
"""

# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
from numba.core.registry import cpu_target

from ... import storage
from . import native

_lock = threading.RLock()  # of numba.config.CACHE_DIR
#: numba's settings that change what is compiled, but not the key that numba finds it by
SETTINGS = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT")
ELSEWHERE = "set RLX_OPTIM_CACHE to a folder of your own"
HAS_OWNERS = hasattr(os, "geteuid")  # Windows has not; a user's folders are closed to others there


def base() -> Path | None:
    """RLX_OPTIM_CACHE, or a folder of ours in numba's (NUMBA_CACHE_DIR) or in the user's cache folder, if there is one."""
    if given := os.environ.get("RLX_OPTIM_CACHE"):
        return Path(given).absolute()
    if given := numba.config.CACHE_DIR:
        return Path(given).absolute() / "rlx_optim"
    user = os.environ.get("XDG_CACHE_HOME", "")
    try:
        above = Path(user) if os.path.isabs(user) else Path.home() / ".cache"  # by XDG's specification a relative one is void
    except RuntimeError:  # a user without a home
        return None
    return above / "rlx_optim"


def name_folder() -> str:
    """Name the folder by what all code in it rests on: this Python, this numba and its settings, this kind of processor (machines
    that share a home would overwrite each other's files), and the text of `native` and of `storage`, whose numbers it has."""
    compiler = cpu_target.target_context.codegen().magic_tuple(), [getattr(numba.config, name, None) for name in SETTINGS]
    digest = hashlib.sha256(repr(compiler).encode())
    for module in (native, storage):
        digest.update(Path(str(module.__file__)).read_bytes())
    return f"python{sys.version_info[0]}.{sys.version_info[1]}-numba{numba.__version__}-{digest.hexdigest()[:8]}"


def cache_folder() -> Path | None:
    """The folder where compiled code is kept; None: nothing can be."""
    return find_folder()[0]


def find_folder() -> tuple[Path | None, str, str]:
    """Find or make the folder where compiled code is kept. Returns it or None, whether it is "writable", "not writable" or
    "refused", and why."""
    within = base()
    if within is None:
        return None, "not writable", "there is no home"
    folder = Path(os.path.realpath(within / name_folder()))  # a link that is changed later leads nowhere else
    try:
        for place in (*reversed(folder.parents), folder):
            if not place.is_dir():
                place.mkdir(0o700, exist_ok=True)
            if HAS_OWNERS and (why := check_place(place, folder)):
                return None, "refused", why
        if HAS_OWNERS and (why := check_content(folder)):
            return None, "refused", why
        with contextlib.suppress(OSError):  # a file system without permissions
            folder.chmod(0o700)
        with tempfile.TemporaryFile(dir=folder):
            return folder, "writable", ""
    except OSError as problem:
        return None, "not writable", f"{within} cannot be written ({problem.strerror}); {ELSEWHERE}"


# ---- who else could put code there ------------------------------------------------------------------------------------------
def check_place(place: Path, folder: Path) -> str | None:
    """Say how another user could change what is in the folder, in a place that is the folder or leads there; None: in no way."""
    found, leads = place.stat(), place != folder
    roots = {0, os.stat("/").st_uid} if leads else set()  # in a container, root may have another number
    if found.st_uid not in {os.geteuid(), *roots}:
        return f"{place} belongs to another user (uid {found.st_uid}); make it your own (chown) or {ELSEWHERE}"
    loose = found.st_mode & 0o022
    if leads and found.st_mode & stat.S_ISVTX:  # nobody can rename what others have there
        return None
    if loose == stat.S_IWGRP and place not in (folder, folder.parent) and is_private(found.st_gid):
        return None
    how = f"others may write in {place} (mode {stat.S_IMODE(found.st_mode):o}); close it (chmod go-w) or {ELSEWHERE}"
    return how if loose else None


def is_private(group: int) -> bool:
    """Whether a group is this user's alone: many systems give everyone one of the same name, and folders that it may write in."""
    import grp
    import pwd

    try:
        name, found = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_name == name and set(found.gr_mem) <= {name}


def check_content(folder: Path) -> str | None:
    """Say which file another user could have put there while the folder was open; None: no file. numba makes files as the umask
    says; where the folder is closed, nobody reaches those that others may write."""
    reached = folder.stat().st_mode & 0o011
    for above, folders, files in os.walk(folder):
        for path in (os.path.join(above, name) for name in (*folders, *files)):
            with contextlib.suppress(FileNotFoundError):  # another process has renamed it meanwhile
                found = os.lstat(path)
                if found.st_uid != os.geteuid():
                    return f"{path} belongs to another user (uid {found.st_uid}); remove {folder} or {ELSEWHERE}"
                if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):  # a pipe would wait for a writer
                    return f"{path} is neither a file nor a folder; remove {folder} or {ELSEWHERE}"
                if reached and found.st_mode & 0o022:
                    return f"others may write {path} (mode {stat.S_IMODE(found.st_mode):o}); remove {folder} or {ELSEWHERE}"
    return None


@functools.cache
def _folder() -> Path | None:
    folder, _, why = find_folder()
    if folder is None and base() is not None:
        warn_once(None, f"compiled code is neither kept nor loaded: {why}")
    return folder


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
        why = f"{type(problem).__name__}: {problem}"
        warn_once(folder, f"compiled code cannot be kept ({why}); clear {folder}, or make room there")
        return made


@contextlib.contextmanager
def _kept_in(folder: Path) -> Iterator[None]:
    with _lock:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(folder)
        try:
            yield
        finally:
            numba.config.CACHE_DIR = before


_warned: set[Path | None] = set()


def warn_once(folder: Path | None, text: str) -> None:
    if folder not in _warned:
        _warned.add(folder)
        warnings.warn(f"rlx_optim: {text}", stacklevel=4)


def compiled(decorator: Callable[..., Any], *signature: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """numba's njit or cfunc with all signatures given, so that it compiles at once, with the cache above."""
    return lambda function: kept(lambda folder: decorator(*signature, cache=folder is not None, **options)(function))

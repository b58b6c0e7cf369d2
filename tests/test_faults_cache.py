"""Where compiled code is kept, and that nothing depends on it: read-only, full, cut short, no home, no compiler."""

import os
import shutil
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest

import rlx_optim

STEP = """
    import sys, warnings
    import numpy as np, rlx_optim
    warnings.simplefilter("always")
    p, g = {"w": np.zeros((300, 100), np.float32)}, {"w": np.ones((300, 100), np.float32)}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            rlx_optim.SGD(lr=1.0, engine="cpu").step_all(p, g)
        norm = rlx_optim.l2_norm(np.ones(1 << 16, np.float32))
        from rlx_optim.engines.cpu.triangular import solve_transposed
        solve_transposed(2 * np.eye(3), x := np.ones((3, 2)))
    print(p["w"][0, 0], norm, x[0, 0], rlx_optim.__file__)
    print([str(w.message) for w in told])
"""
RIGHT = ["-2.0", "256.0", "0.5"]


def started(code=STEP, **environment):
    """The code's output: what it computed, and its warnings."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RLX_OPTIM_CACHE", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR")}
    kept |= {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False,
        env={k: v for k, v in {**kept, **environment}.items() if v is not None},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *numbers, where = done.stdout.splitlines()[0].split()
    return numbers, done.stdout.splitlines()[1], where


def caches(folder):
    return [path for path in Path(folder).rglob("*") if path.suffix in (".nbi", ".nbc")]


def installation(folder):
    """A copy of the package of its own."""
    shutil.copytree(Path(rlx_optim.__file__).parent, folder / "rlx_optim", ignore=shutil.ignore_patterns("__pycache__"))
    return str(folder)


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache with everything in it that STEP needs, and the installation it is of."""
    folder = tmp_path_factory.mktemp("cache")
    path = installation(folder / "site")
    numbers, told, where = started(PYTHONPATH=path, RLX_OPTIM_CACHE=str(folder / "kept"))
    assert where.startswith(path)
    assert (numbers, told) == (RIGHT, "[]")
    return folder / "kept", path


def test_all_that_is_compiled_is_kept_in_one_folder(filled):
    folder, path = filled
    names = {file.name.partition("-")[0] for file in caches(folder)}
    assert {"parallel._alone", "parallel._spread", "norms._kernel", "triangular._substitute"} <= names
    assert any(name.startswith("rlx_plain") for name in names)
    assert not caches(path)


def test_a_read_only_installation_without_a_home(tmp_path):
    """What chmod would not do to root: files stand where numba would make its folders, and passwd knows nobody."""
    path = installation(tmp_path / "site")
    (tmp_path / "site" / "rlx_optim" / "engines" / "cpu" / "__pycache__").write_text("")
    (tmp_path / "temporary").mkdir()
    nobody = "import pwd\ndef nobody(uid): raise KeyError(uid)\npwd.getpwuid = nobody\n" + textwrap.dedent(STEP)
    numbers, told, where = started(nobody, PYTHONPATH=path, HOME=None, TMPDIR=str(tmp_path / "temporary"))
    assert (numbers, told) == (RIGHT, "[]")
    assert where.startswith(path)
    assert not caches(tmp_path)
    assert not list((tmp_path / "temporary").iterdir())  # nothing is left behind


def one_less(filled, suffix):
    """The filled cache, and in it the files of a kernel and of the watch, which are to fail."""
    folder, path = filled
    return folder, path, [f for f in folder.rglob(f"*{suffix}") if f.name.startswith(("rlx_sgd", "parallel"))]


@pytest.mark.parametrize("suffix", [".nbi", ".nbc", ".py"])
def test_a_cache_file_that_was_cut_short(filled, suffix):
    folder, path, cut = one_less(filled, suffix)
    whole = {file: file.read_bytes() for file in cut}
    for file, content in whole.items():
        file.write_bytes(content[:3])
    numbers, told, _ = started(PYTHONPATH=path, RLX_OPTIM_CACHE=str(folder))
    assert numbers == RIGHT
    if suffix == ".py":
        assert told == "[]"  # written anew
        assert all(file.read_bytes() == content for file, content in whole.items())
    else:
        assert told.count("compiled code cannot be kept") == 1
        assert f"clear {next(folder.iterdir())}" in told
    for file, content in whole.items():
        file.write_bytes(content)


def test_a_full_disk(filled):
    """No file may grow beyond a few kilobytes, which fails as a full disk does: when it is written."""
    folder, path, lost = one_less(filled, ".nbc")
    whole = {file: file.read_bytes() for file in lost}
    for file in lost:
        file.unlink()
    limited = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n" + textwrap.dedent(STEP)
    numbers, told, _ = started(limited, PYTHONPATH=path, RLX_OPTIM_CACHE=str(folder))
    assert numbers == RIGHT
    assert told.count("compiled code cannot be kept") == 1
    assert str(folder) in told
    assert not [file for file in folder.rglob("*") if ".tmp" in file.name]
    for file, content in whole.items():
        file.write_bytes(content)


def test_a_kernel_that_does_not_compile_says_so_itself(tmp_path, monkeypatch):
    """Not that the cache is broken."""
    from rlx_optim.engines.cpu import cache

    def make(folder):
        raise TypeError("the kernel is wrong")

    monkeypatch.setattr(cache, "_folder", lambda: tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TypeError, match="the kernel is wrong"):
            cache.kept(make)


# ---- who may write where code is loaded from --------------------------------------------------------------------------------
STRANGER = 54321  # a uid that nobody has
POSIX = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners")
ROOT = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A folder above the cache's base, the base, the folder in it that code is loaded from, and a file of numba's there."""
    from rlx_optim.engines.cpu import cache

    base = tmp_path / "above" / "base"
    monkeypatch.setenv("RLX_OPTIM_CACHE", str(base))
    folder = cache.cache_folder()
    assert folder == base / cache.name_folder()
    (folder / "sub").mkdir()
    (folder / "sub" / "a.nbi").write_bytes(b"")
    return {"above": base.parent, "base": base, "folder": folder, "sub": folder / "sub", "file": folder / "sub" / "a.nbi"}


def what_is_said():
    from rlx_optim.engines.cpu import cache

    folder, status, why = cache.find_folder()
    assert (folder is None) is (status != "writable")
    return status, why


@POSIX
def test_a_folder_of_our_making_is_closed_to_others(tree):
    assert [tree[name].stat().st_mode & 0o777 for name in ("above", "base", "folder")] == [0o700] * 3
    assert what_is_said() == ("writable", "")


@POSIX
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o770, 0o707, 0o1777, 0o2775])
@pytest.mark.parametrize("where", ["above", "base", "folder"])
def test_a_folder_that_others_can_change_is_refused(tree, where, mode):
    """With a sticky bit nobody can rename what leads to the folder; in the folder itself it does not help. A group of the user's
    own, as root's is, may write above."""
    tree[where].chmod(mode)
    status, why = what_is_said()
    if (mode & 0o1000 and where != "folder") or (where == "above" and not mode & 0o002 and os.geteuid() == 0):
        assert (status, why) == ("writable", "")
    else:
        said = f"others may write in {tree[where]} (mode {mode:o}); close it (chmod go-w) or set RLX_OPTIM_CACHE to a folder of your own"
        assert (status, why) == ("refused", said)
        tree[where].chmod(mode & ~0o022)
        assert what_is_said() == ("writable", "")


@ROOT
@pytest.mark.parametrize("where", ["above", "base", "folder", "sub", "file"])
def test_what_belongs_to_another_user_is_refused(tree, where):
    os.chown(tree[where], STRANGER, STRANGER)
    status, why = what_is_said()
    assert status == "refused"
    assert f"{tree[where]} belongs to another user (uid {STRANGER})" in why
    assert "set RLX_OPTIM_CACHE to a folder of your own" in why


@ROOT
def test_a_group_of_others_may_not_write_above(tree):
    os.chown(tree["above"], 0, STRANGER)
    tree["above"].chmod(0o770)
    assert what_is_said()[0] == "refused"


@POSIX
def test_files_that_others_could_write_are_refused_where_they_could_be_reached(tree):
    """numba makes files as the umask says; in a closed folder that does not matter."""
    tree["file"].chmod(0o666)
    assert what_is_said()[0] == "writable"
    tree["folder"].chmod(0o755)
    status, why = what_is_said()
    assert status == "refused"
    assert f"others may write {tree['file']} (mode 666); remove {tree['folder']}" in why
    tree["file"].chmod(0o644)
    assert what_is_said()[0] == "writable"
    assert tree["folder"].stat().st_mode & 0o777 == 0o700  # closed now


@POSIX
def test_links_and_pipes_in_the_folder_are_refused(tree, tmp_path):
    os.mkfifo(tree["sub"] / "b.nbi")
    assert "b.nbi is neither a file nor a folder" in what_is_said()[1]
    os.unlink(tree["sub"] / "b.nbi")
    (tmp_path / "elsewhere").mkdir()
    (tree["folder"] / "link").symlink_to(tmp_path / "elsewhere")
    assert "link is neither a file nor a folder" in what_is_said()[1]


@POSIX
def test_a_link_is_judged_by_where_it_leads(tree, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tree["base"])
    monkeypatch.setenv("RLX_OPTIM_CACHE", str(tmp_path / "link"))
    from rlx_optim.engines.cpu import cache

    assert cache.cache_folder() == tree["folder"]
    tree["base"].chmod(0o777)
    assert what_is_said()[0] == "refused"


def test_where_files_have_no_owners_nothing_is_refused(tree, monkeypatch):
    """As on Windows, where every mode reads as 777."""
    from rlx_optim.engines.cpu import cache

    monkeypatch.delattr(os, "geteuid", raising=False)
    monkeypatch.setattr(cache, "HAS_OWNERS", False)
    tree["folder"].chmod(0o777)
    assert what_is_said() == ("writable", "")


@POSIX
@pytest.mark.parametrize("variable", ["RLX_OPTIM_CACHE", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"])
def test_no_pickle_is_loaded_from_a_folder_that_others_can_change(filled, tmp_path, variable):
    """Every index is one that leaves a mark when it is read; the same files in a closed folder show that it works."""
    folder, path = filled
    base = tmp_path / ("." if variable == "RLX_OPTIM_CACHE" else "rlx_optim")
    shutil.copytree(folder, base, dirs_exist_ok=True)
    mark = tmp_path / "mark"
    for file in caches(base):
        if file.suffix == ".nbi":
            file.write_bytes(f"cos\nsystem\n(S'touch {mark}'\ntR.".encode())
    tmp_path.chmod(0o777)
    numbers, told, _ = started(PYTHONPATH=path, **{variable: str(tmp_path)})
    assert (numbers, mark.exists()) == (RIGHT, False)
    assert told.count("rlx_optim: ") == 1
    assert f"compiled code is neither kept nor loaded: others may write in {tmp_path} (mode 777); close it (chmod go-w)" in told
    if variable == "RLX_OPTIM_CACHE":
        tmp_path.chmod(0o700)
        started(PYTHONPATH=path, **{variable: str(tmp_path)})
        assert mark.exists()


def test_a_home_that_cannot_be_written_is_said_once(filled, tmp_path):
    (tmp_path / ".cache").write_text("")  # what chmod would not do to root
    numbers, told, _ = started(PYTHONPATH=filled[1], HOME=str(tmp_path))
    assert numbers == RIGHT
    assert told.count("rlx_optim: ") == 1
    assert f"compiled code is neither kept nor loaded: {tmp_path / '.cache/rlx_optim'} cannot be written" in told
    assert "set RLX_OPTIM_CACHE to a folder of your own" in told


def test_a_relative_cache_home_is_void(tmp_path, monkeypatch):
    """By XDG's specification: else code would be loaded from whatever folder one is in."""
    from rlx_optim.engines.cpu import cache

    monkeypatch.delenv("RLX_OPTIM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.base() == tmp_path / ".cache" / "rlx_optim"


def test_a_source_that_is_not_text_is_written_anew(tmp_path):
    from rlx_optim.engines.cpu import kernels

    text = "from numba import cfunc, void\n\n\n@cfunc(void())\ndef kernel():\n    pass\n"
    (tmp_path / "rlx_x.py").write_bytes(b"\xff\xfe")
    try:
        kernels._made("rlx_x", text, tmp_path)
    finally:
        sys.modules.pop("rlx_x", None)
    assert (tmp_path / "rlx_x.py").read_bytes() == text.encode()


@pytest.mark.parametrize(("name", "value"), [("OPT", 0), ("LOOP_VECTORIZE", 0), ("BOUNDSCHECK", 1)])
def test_code_that_was_compiled_with_other_settings_is_not_taken(name, value, monkeypatch):
    """numba leaves them out of its own key: one run with NUMBA_OPT=0 would slow down all later ones."""
    import numba

    from rlx_optim.engines.cpu import cache

    usual = cache.name_folder()
    monkeypatch.setattr(numba.config, name, value)
    assert cache.name_folder() != usual


def test_processors_of_two_kinds_share_no_folder(monkeypatch):
    """They would number their files alike, and one could load what the other wrote."""
    from rlx_optim.engines.cpu import cache

    usual = cache.name_folder()
    codegen = cache.cpu_target.target_context.codegen()
    monkeypatch.setattr(type(codegen), "magic_tuple", lambda self: ("x86_64", "generic", ""))
    assert cache.name_folder() != usual


# ---- no compiler ----------------------------------------------------------------------------------------------------------
def test_numba_that_is_told_not_to_compile():
    code = """
        import warnings
        import numpy as np, rlx_optim
        p, g = {"w": np.zeros((300, 100), np.float32)}, {"w": np.ones((300, 100), np.float32)}
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2):
                opt = rlx_optim.SGD(lr=1.0)
                opt.step_all(p, g)
            norm = rlx_optim.l2_norm(np.ones(1 << 16, np.float32))
        try:
            rlx_optim.SGD(lr=1.0, engine="cpu").step_all(p, g)
        except ValueError as problem:
            told.append(warnings.WarningMessage(problem, UserWarning, "", 0))
        print(p["w"][0, 0], norm, opt.engine.name, rlx_optim.__file__)
        print([str(w.message) for w in told])
    """
    numbers, told, _ = started(code, NUMBA_DISABLE_JIT="1")
    assert numbers == ["-2.0", "256.0", "reference"]
    assert told.count("stepping on the slow reference engine: numba is told not to compile (unset NUMBA_DISABLE_JIT)") == 1
    assert "engine 'cpu' cannot run: numba is told not to compile (unset NUMBA_DISABLE_JIT)" in told


def test_the_cpu_engine_without_numba(monkeypatch):
    from rlx_optim import engines

    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None)
    engines._engine.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"engine 'cpu' cannot run: numba is not installed \(pip install numba\)"):
            rlx_optim.AdamW(engine="cpu").step("w", np.ones(2, np.float32), np.ones(2, np.float32))
    finally:
        engines._engine.cache_clear()

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
    assert {"watch._admit", "parallel._alone", "parallel._spread", "norms._kernel", "triangular._substitute"} <= names
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
    return folder, path, [f for f in folder.rglob(f"*{suffix}") if f.name.startswith(("rlx_sgd", "watch"))]


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

"""Checkpoints under attack: crashes while one is written, and files that are not what they should be."""

import contextlib
import copy
import errno
import hashlib
import io
import json
import os
import random
import shutil
import string
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from helpers import copies, problem, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rlx_optim
from rlx_optim import CheckpointError
from rlx_optim.checkpoint import files
from rlx_optim.checkpoint.format import DIGEST_AT

FAULTS = Path(__file__).parent / "faults.py"


# ---- crashes ----------------------------------------------------------------------------------------------------------------
def crash(mode, folder, rounds=1, before=()):
    done = subprocess.run(
        [*before, sys.executable, str(FAULTS), mode, str(folder), str(rounds)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    if "skip" in result:
        pytest.skip(result["skip"])
    assert result.get("temporaries", []) == []
    return result


@pytest.mark.parametrize("rounds", [100, pytest.param(3000, marks=pytest.mark.slow)])
def test_killed_at_random_times_the_last_one_loads(rounds, tmp_path):
    found = crash("kill", tmp_path, rounds)
    assert found["died_inside_a_save"] > rounds / 20  # otherwise nothing was tested


def test_a_fault_at_each_system_call(tmp_path):
    """SIGKILL, EIO and ENOSPC: the old file or the new one is there and loads, and errors are CheckpointErrors."""
    if shutil.which("strace") is None:
        pytest.skip("no strace")
    folder = tmp_path / "here"
    folder.mkdir()
    found = crash("strace", folder)
    assert {"openat", "write", "fsync", "rename", "read"} <= found["calls"].keys()
    assert found["calls"]["fsync"] == 2  # the file, and the folder
    assert found["ends"]["signal=SIGKILL: old"] > 20
    assert found["ends"]["signal=SIGKILL: new"] >= 1


def test_a_file_that_may_not_grow(tmp_path):
    found = crash("limit", tmp_path)
    assert "cannot be written: File too large" in found["said"]
    assert found["iteration"] == 1


def test_a_full_disk_and_a_read_only_one(tmp_path):
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces")
    found = crash("full", tmp_path, before=["unshare", "-rm"])
    assert "No space left on device; make room there, or write elsewhere" in found["full"]
    assert "Read-only file system" in found["read_only"]
    assert found["iteration"] == 1


class Full(io.RawIOBase):
    """A file on a disk that takes 8 KiB, and then nothing more, however often it is asked."""

    def __init__(self, raw):
        super().__init__()
        self.raw = raw

    def writable(self):
        return True

    def fileno(self):
        return self.raw.fileno()

    def write(self, data):
        if self.raw.tell() + len(data) > 8192:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.raw.write(data)

    def close(self):
        if not self.closed:
            self.raw.close()
        super().close()


@pytest.mark.parametrize("locks", [True, False], ids=["posix", "windows"])
@pytest.mark.parametrize("what", ["save", "convert"])
def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch, locks, what):
    """Not even where a file is closed before it is removed, which writes once more what did not fit."""
    convert = pytest.importorskip("rlx_optim.torch.foreign").convert
    opt, params = rlx_optim.AdamW(), {"w": np.ones((64, 64), np.float32)}
    opt.step_all(params, {"w": np.ones((64, 64), np.float32)})
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    opt.save(tmp_path / "from/a.safetensors")
    path = tmp_path / "to" / ("b.safetensors" if what == "save" else "b.pt")
    path.write_text("what was there")

    def opened(file, mode="r", *rest):
        return io.BufferedWriter(Full(open(file, mode, buffering=0))) if mode == "xb" else open(file, mode, *rest)

    monkeypatch.setattr(files, "open", opened, raising=False)
    if not locks:
        monkeypatch.setattr(files, "fcntl", None)
    said = f"{path.name}: cannot be written: No space left on device; make room there, or write elsewhere"
    with pytest.raises(CheckpointError, match=said):
        opt.save(path) if what == "save" else convert(tmp_path / "from/a.safetensors", path)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert path.read_text() == "what was there"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_the_right_to_write(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(CheckpointError, match="Permission denied"):
        rlx_optim.AdamW().save(tmp_path / "a.safetensors")


def test_several_writers_at_once(tmp_path):
    found = crash("writers", tmp_path, 60)
    assert found["codes"] == [0, 0, 0, 0]
    assert found["loads"] > 1
    assert found["kept"] >= 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("after", ["sort_by_age", "latest"])
def test_the_latest_is_found_while_a_writer_removes_old_ones(after, tmp_path, monkeypatch):
    """The file that was listed, or chosen, is gone when it is opened, and another one is there."""
    opt, (params, grads) = rlx_optim.AdamW(lr=0.1), ({"w": np.ones(3)}, {"w": np.ones(3)})
    opt.step_all(params, grads)
    opt.save(tmp_path / "{iteration}.safetensors", keep=1)
    module = files if after == "sort_by_age" else rlx_optim.checkpoint
    usual = getattr(module, after)

    def rotated(*given):
        found = usual(*given)
        if opt.iteration == 1:
            opt.step_all(params, grads)
            opt.save(tmp_path / "{iteration}.safetensors", keep=1)
        return found

    monkeypatch.setattr(module, after, rotated)
    assert rlx_optim.load_latest(tmp_path).iteration == 2
    assert os.listdir(tmp_path) == ["00000002.safetensors"]


def test_a_link_that_leads_nowhere_is_no_checkpoint(tmp_path):
    (tmp_path / "a.safetensors").symlink_to(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"there is no good checkpoint$"):
        rlx_optim.load_latest(tmp_path)


def test_a_link_to_itself_is_not_replaced(tmp_path):
    loop, one, two = (tmp_path / f"{name}.safetensors" for name in ("loop", "one", "two"))
    loop.symlink_to(loop)
    one.symlink_to(two)
    two.symlink_to(one)
    for path in (loop, one):
        with pytest.raises(CheckpointError, match="is a link that leads to itself; remove it, or write elsewhere"):
            rlx_optim.AdamW().save(path)
        assert path.is_symlink()
        with pytest.raises(CheckpointError, match="cannot be read: Too many levels of symbolic links"):
            rlx_optim.load(path)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_where_no_open_file_can_be_renamed_or_removed(tmp_path, monkeypatch):
    """As on Windows."""
    from rlx_optim.checkpoint import files

    def closed(call):
        def checked(path, *rest, **more):
            here = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
            if os.path.realpath(path) in here:
                raise PermissionError(13, "it is being used by another process", str(path))
            return call(path, *rest, **more)

        return checked

    monkeypatch.setattr(files, "fcntl", None)
    monkeypatch.setattr(os, "replace", closed(os.replace))
    monkeypatch.setattr(os, "unlink", closed(os.unlink))
    opt, (params, grads) = rlx_optim.AdamW(lr=0.1), ({"w": np.ones(3)}, {"w": np.ones(3)})
    for _ in range(2):
        opt.step_all(params, grads)
        opt.save(tmp_path / "a.safetensors")
    assert rlx_optim.load(tmp_path / "a.safetensors").iteration == 2
    opt.step_all(params, {"w": np.full(3, np.nan)})
    with pytest.raises(CheckpointError, match="NaN"):
        opt.save(tmp_path / "b.safetensors")
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_places_that_cannot_be(tmp_path):
    opt = rlx_optim.AdamW()
    with pytest.raises(CheckpointError, match="cannot be written: No such file"):
        opt.save(tmp_path / "nowhere" / "a.safetensors")
    with pytest.raises(CheckpointError, match="No such file"):
        rlx_optim.load(tmp_path / "a.safetensors")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="is a device or a pipe; give the name of a file"):
        opt.save(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    for place in (tmp_path / "pipe", tmp_path, "/dev/zero"):
        with pytest.raises(CheckpointError, match="not a file"):
            rlx_optim.load(place)


# ---- bad files --------------------------------------------------------------------------------------------------------------
def opt_and_file(folder):
    """Muon with AdamW behind it, a group, a schedule's mark nowhere; three parameters."""
    opt = rlx_optim.Muon(
        lr=0.25, groups=[{"match": "w", "lr": 0.5}], otherwise=rlx_optim.NAdamW(convention="torch"), engine="reference"
    )
    params, gradients = problem({"w": (3, 2), "x": (2, 2), "b": (3,)}, steps=2)
    run(opt, params, gradients)
    path = folder / "good.safetensors"
    opt.save(path)
    return opt, path.read_bytes()


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return opt_and_file(tmp_path_factory.mktemp("good"))[1]


@pytest.fixture(scope="module")
def kron(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kron")
    opt = rlx_optim.KronPSGD(engine="reference")
    opt.step("w", np.ones((3, 2), np.float32), np.ones((3, 2), np.float32))
    opt.save(folder / "good.safetensors")
    return (folder / "good.safetensors").read_bytes()


def parts(raw):
    """Header, manifest and data of a file."""
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    return header, json.loads(header["__metadata__"]["manifest"]), raw[8 + length :]


def signed(text, data):
    """A file with this header and data, its digest right."""
    header = bytearray(text.encode() if isinstance(text, str) else text)
    place = DIGEST_AT - 8
    if len(header) >= place + 64:
        header[place : place + 64] = b"0" * 64
    raw = bytearray(len(header).to_bytes(8, "little") + header + data)
    if len(header) >= place + 64:
        raw[DIGEST_AT : DIGEST_AT + 64] = hashlib.sha256(raw).hexdigest().encode()
    return bytes(raw)


def rebuilt(header, manifest, data):
    header = {**header, "__metadata__": {**header["__metadata__"], "manifest": json.dumps(manifest)}}
    return signed(json.dumps(header, separators=(",", ":")), data)


def changed(raw, change):
    """The file after `change` of its (header, manifest), signed anew; change may give new data."""
    header, manifest, data = parts(raw)
    return rebuilt(header, manifest, change(header, manifest, data) or data)


def refuses(raw, folder, said):
    path = folder / "bad.safetensors"
    path.write_bytes(raw)
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(CheckpointError, match=said) as caught:
            rlx_optim.load(path, engine="reference")
        assert time.process_time() - start < 20  # of this process: other work on the machine does not count
        assert tracemalloc.get_traced_memory()[1] < 2_000_000 + 30 * len(raw)
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)


def test_the_tools_here_are_right(good, tmp_path):
    header, manifest, data = parts(good)
    (tmp_path / "a.safetensors").write_bytes(rebuilt(header, manifest, data))
    assert rlx_optim.load(tmp_path / "a.safetensors").iteration == 2


def renamed(header, old, new):
    header[new] = header.pop(old)


def at(path, value):
    """A change of one entry of the manifest."""

    def change(header, manifest, data):
        place = manifest
        for key in path[:-1]:
            place = place[key]
        if value is KeyError:
            del place[path[-1]]
        else:
            place[path[-1]] = value

    return change


W = ("parameters", "w")
CHANGES = {
    "wrong dtype": (lambda h, m, d: h["w/m"].update(dtype="F64"), "does not fill"),
    "unknown dtype": (lambda h, m, d: h["w/m"].update(dtype="F16"), "dtype is 'F16'; known are F32, F64, BF16, I8, U8"),
    "dtype of other width": (lambda h, m, d: h["w/m"].update(dtype="F64", shape=[3]), "'m' of 'w' has shape \\(3,\\), expected \\(3, 2\\)"),
    "wrong shape": (lambda h, m, d: h["w/m"].update(shape=[2, 3]), "'m' of 'w' has shape \\(2, 3\\), expected \\(3, 2\\)"),
    "negative shape": (lambda h, m, d: h["w/m"].update(shape=[-3, -2]), "whole numbers"),
    "shape of floats": (lambda h, m, d: h["w/m"].update(shape=[3.0, 2.0]), "whole numbers"),
    "shape of truths": (lambda h, m, d: h["w/m"].update(shape=[True, True, 6]), "whole numbers"),
    "huge shape": (lambda h, m, d: h["w/m"].update(shape=[2**40, 2**40]), "does not fill"),
    "many dimensions": (lambda h, m, d: h["w/m"].update(shape=[1] * 65), "whole numbers"),
    "renamed tensor": (lambda h, m, d: renamed(h, "w/m", "w/n"), "state 'm' of 'w' is missing"),
    "tensor of nobody": (lambda h, m, d: renamed(h, "w/m", "v/m"), "'v/m' belongs to no parameter"),
    "tensor without a slash": (lambda h, m, d: renamed(h, "w/m", "wm"), "not named <parameter>/<slot>"),
    "tensor gone": (lambda h, m, d: h.pop("w/m") and None, "begins at|accounts for"),
    "tensor too many": (
        lambda h, m, d: h.update({"w/q": {"dtype": "F32", "shape": [0], "data_offsets": [len(d), len(d)]}}), "state 'q' of 'w' is unknown to Muon"),
    "overlap": (lambda h, m, d: h["x/m"].update(data_offsets=[8, 24]), "begins at 8, but what comes before it ends at 24"),
    "hole": (lambda h, m, d: h["b/v"].update(data_offsets=[o + 4 for o in h["b/v"]["data_offsets"]]), "begins at"),
    "offsets backwards": (lambda h, m, d: h["w/m"].update(data_offsets=[24, 0]), "does not fill"),
    "offsets beyond": (lambda h, m, d: h["b/v"].update(data_offsets=[2**50, 2**50 + 12]), "begins at"),
    "three offsets": (lambda h, m, d: h["w/m"].update(data_offsets=[0, 24, 24]), "two whole numbers"),
    "entry without dtype": (lambda h, m, d: h["w/m"].pop("dtype") and None, "must have dtype"),
    "entry with more": (lambda h, m, d: h["w/m"].update(extra=1), "must have dtype"),
    "entry that is none": (lambda h, m, d: h.update({"w/m": 3}), "must have dtype"),
    "data too long": (lambda h, m, d: d + b"\0\0\0\0", "longer than its header says"),
    "data too short": (lambda h, m, d: d[:-4], "cut off: it has"),
    "NaN in it": (lambda h, m, d: np.float32(np.nan).tobytes() + d[4:], "m of 'w' holds NaN"),
    "future version": (at(("format_version",), 3), "format version 3 is not known here .this rlx_optim reads 1 and 2"),
    "version of another kind": (at(("format_version",), "1"), "'format_version' must be a whole number from 0 on, got '1'"),
    "no version": (at(("format_version",), KeyError), "lacks 'format_version'"),
    "no optimizer": (at(("optimizers",), []), "names no optimizer"),
    "unknown optimizer": (at(("optimizers", 0, "name"), "adamx"), "the checkpoint is of 'adamx', which is not registered; import the package"),
    "unknown hyperparameter": (at(("optimizers", 0, "hyperparameters", "beta9"), 1), "unknown hyperparameter 'beta9'"),
    "hyperparameter out of range": (at(("optimizers", 0, "hyperparameters", "lr"), -1), "lr must be a finite number >= 0"),
    "hyperparameter beyond floats": (at(("optimizers", 0, "hyperparameters", "lr"), 10**400), "lr must be a finite number >= 0"),
    "hyperparameter infinite": (at(("optimizers", 0, "hyperparameters", "lr"), "Infinity"), "lr must be"),
    "hyperparameters that are none": (at(("optimizers", 0, "hyperparameters"), [1]), "'hyperparameters' must be an object, got"),
    "callable that is unknown": (at(("optimizers", 0, "callables"), ["foo"]), "'foo' is marked as a callable"),
    "callable that is owed": (at(("optimizers", 0, "callables"), ["lr"]), "lr was a callable"),
    "group sets what is unknown": (at(("optimizers", 0, "groups", 0, "overrides"), ["foo"]), "a group sets unknown 'foo'"),
    "group without a pattern": (at(("optimizers", 0, "groups", 0, "match"), [3]), "list of names"),
    "group to nowhere": (at(("optimizers", 1, "groups"), [
        {"match": "q", "otherwise": True, "overrides": [], "hyperparameters": {}, "callables": [], "extra": {}}]), "there is none"),
    "parameters that are none": (at(("parameters",), []), "'parameters' must be an object, got"),
    "parameter gone": (at(W, KeyError), "'w/m' belongs to no parameter"),
    "parameter of no optimizer": (at((*W, "optimizer"), 2), "stepped by optimizer 2, and there are 2"),
    "parameter of another optimizer": (at((*W, "optimizer"), 1), "group 0 of nadamw, which has 0"),
    "parameter of no group": (at((*W, "group"), 1), "is in group 1 of muon, which has 1"),
    "parameter of another shape": (at((*W, "shape"), [2, 3]), "not its shape|expected"),
    "parameter of huge shape": (at((*W, "shape"), [2**52, 2**52]), "not its shape"),
    "parameter of unknown dtype": (at((*W, "dtype"), "int8"), "dtype cannot be 'int8'"),
    "steps backwards": (at((*W, "step"), -1), "'step' must be a whole number"),
    "steps beyond counting": (at((*W, "step"), 2**60), "'step' must be a whole number"),
    "half a step": (at((*W, "step"), 1.5), "'step' must be a whole number from 0 on, got 1.5"),
    "counter gone": (at(("parameters", "b", "counters"), {}), "counter 'mu_product' of 'b' is missing"),
    "counter unknown": (at((*W, "counters"), {"foo": 1}), "state 'foo' of 'w' is unknown to Muon"),
    "counter that is none": (at(("parameters", "b", "counters", "mu_product"), "1"), "counters: 'mu_product' must be a number, got '1'"),
    "counter beyond": (at(("parameters", "b", "counters", "mu_product"), 10**400), "counters: 'mu_product' must be a number, got"),
    "pieces that do not fit": (at((*W, "pieces"), 5), "5 pieces of shape \\(3, 2\\)"),
    "policy unknown": (at(("nonfinite",), "hope"), "'nonfinite' cannot be 'hope'"),
    "iteration that is none": (at(("iteration",), None), "'iteration' must be a whole number from 0 on, got None"),
    "manifest that is none": (lambda h, m, d: None, None),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_a_changed_file_that_is_signed_anew_is_refused(case, good, tmp_path):
    change, said = CHANGES[case]
    if said is None:
        header, _, data = parts(good)
        for text in ("3", "[]", "null", '"x"'):
            header["__metadata__"]["manifest"] = text
            refuses(signed(json.dumps(header, separators=(",", ":")), data), tmp_path, "the manifest lacks 'format_version'")
        del header["__metadata__"]["manifest"]
        refuses(signed(json.dumps(header, separators=(",", ":")), data), tmp_path, "the manifest is missing")
        return
    refuses(changed(good, change), tmp_path, said)


@pytest.fixture(scope="module")
def older(kron):
    """A file of the time before keys of noise were state: two words of 32 bits stand in the manifest."""

    def change(header, manifest, data):
        start, end = header.pop("w/key")["data_offsets"]
        halves = np.frombuffer(data[start:end], np.float32).astype(int).tolist()
        manifest["parameters"]["w"]["generator"] = [[halves[0] + (halves[1] << 16), halves[2] + (halves[3] << 16)]]
        for each in [each for name, each in header.items() if name != "__metadata__"]:
            each["data_offsets"] = [at - (end - start) * (at > start) for at in each["data_offsets"]]
        return data[:start] + data[end:]

    return changed(kron, change)


def test_an_older_file_keeps_its_key_of_noise(kron, older, tmp_path):
    steps = []
    for raw in (kron, older):
        (tmp_path / "a.safetensors").write_bytes(raw)
        opt = rlx_optim.load(tmp_path / "a.safetensors", engine="reference")
        opt.end_iteration()
        p = np.ones((3, 2), np.float32)
        opt.step("w", p, np.arange(6, dtype=np.float32).reshape(3, 2))
        steps.append([p, *opt.state("w").values()])
    assert len(steps[0]) == 6
    assert all(np.array_equal(a, b) for a, b in zip(*steps, strict=True))


@pytest.mark.parametrize("words", [[[1, 2**32]], [[1, -2]], [[1]], [[1, 2], [3, 4]], [], "ab", None, [[1.5, 2]]])
def test_an_older_files_damaged_key_is_refused(older, words, tmp_path):
    refuses(changed(older, at(("parameters", "w", "generator"), words)), tmp_path, "parameter 'w' has no key of its noise")


def test_every_cut_is_noticed(good, tmp_path):
    for length in {*range(0, 120), *range(120, len(good), 7), len(good) - 1}:
        refuses_quickly(good[:length], tmp_path)


def refuses_quickly(raw, folder):
    path = folder / "bad.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError):
        rlx_optim.load(path, engine="reference")


def test_every_byte_is_under_the_digest(good, tmp_path):
    rng = random.Random(0)
    for place in range(0, len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << rng.randrange(8)
        refuses_quickly(bytes(bad), tmp_path)


def test_padding_and_doubling(good, tmp_path):
    for raw in (good + b"\0", good + good, b"\0" + good, good + b" " * 100):
        refuses_quickly(raw, tmp_path)
    header, manifest, data = parts(good)
    text = json.dumps(header, separators=(",", ":"))
    entry = json.dumps(header["w/m"])
    refuses(signed(text[:-1] + f',"w/m":{entry}}}', data), tmp_path, "the key 'w/m' stands there twice")
    refuses(signed(text[:-1] + ',"__metadata__":{}}', data), tmp_path, "'__metadata__' stands there twice")
    doubled = json.dumps(manifest)[:-1] + ',"iteration":7}'
    header["__metadata__"]["manifest"] = doubled
    refuses(signed(json.dumps(header, separators=(",", ":")), data), tmp_path, "'iteration' stands there twice")


def test_bombs(good, tmp_path):
    """Declared sizes are believed only as far as the file goes, and nothing is made before it is known to be there."""
    header, manifest, data = parts(good)
    text = json.dumps(header, separators=(",", ":"))
    for length in (2**64 - 1, 2**63, 2**40, 100_000_001, len(good)):
        refuses(length.to_bytes(8, "little") + good[8:], tmp_path, "declares a header of")
    start = '{"__metadata__":{"sha256":"' + "0" * 64 + '","format":"rlx_optim","manifest":'
    deep = "[" * 100_000
    refuses(signed(start + deep, b""), tmp_path, "nested too deeply|damaged")
    for depth in (300, 900, 5000):
        manifest["optimizers"][0]["hyperparameters"]["lr"] = json.loads("[" * 200 + "]" * 200)
        nested = json.dumps(manifest).replace("[" * 200 + "]" * 200, "[" * depth + "]" * depth)
        header["__metadata__"]["manifest"] = nested
        refuses(signed(json.dumps(header, separators=(",", ":")), data), tmp_path, "nested too deeply|lr must be")
    refuses(signed(text.replace('"shape":[3,2]', '"shape":[' + "9" * 5000 + "]", 1), data), tmp_path, "damaged")
    refuses(signed(text.replace('"shape":[3,2]', '"shape":[NaN]', 1), data), tmp_path, "NaN is not JSON")
    many = "".join(f'"{i}/m":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}},' for i in range(20_000))
    refuses(signed(text[:-1] + "," + many[:-1] + "}", data), tmp_path, "belongs to no parameter")


def test_files_of_others(tmp_path):
    for raw in (b"", b"\0" * 7, b"\0" * 8, b"\0" * 100, b"PK\x03\x04" * 50, os.urandom(4096), b"{}" * 50):
        refuses_quickly(raw, tmp_path)
    safetensors = pytest.importorskip("safetensors.numpy")
    safetensors.save_file({"w/m": np.ones((3, 2), np.float32)}, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match="not a sound checkpoint of rlx_optim"):
        rlx_optim.load(tmp_path / "b.safetensors")


# ---- counters -------------------------------------------------------------------------------------------------------------
OUTSIDE = [
    ("schedulefreesgd", "momentum", 1.0, ">= 0 and < 1"), ("schedulefreeadamw", "momentum", 1, ">= 0 and < 1"),
    ("schedulefreesgd", "momentum", -0.5, ">= 0 and < 1"), ("schedulefreeadamw", "weight_sum", -1.0, ">= 0"),
    ("schedulefreeadamw", "lr_max", -1.0, ">= 0"), ("nadamw", "mu_product", 1.5, ">= 0 and <= 1"), ("sgd", "started", 2, ">= 0 and <= 1"),
    ("sophia", "estimates", -1, ">= 0"), ("kronpsgd", "counter", -1, ">= 0"), ("laprop", "lr_average", -0.5, ">= 0"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*before any estimate")
@pytest.mark.parametrize(("name", "counter", "value", "needed"), OUTSIDE)
def test_a_counter_out_of_range_is_refused(name, counter, value, needed, tmp_path):
    """Schedule-Free's momentum of 1 would load, and the next step divide by zero."""
    settings = {"nadamw": {"convention": "torch"}, "sgd": {"momentum": 0.9}}.get(name, {})
    opt = rlx_optim.create(name, engine="reference", **{"lr": 0.1, **settings})
    opt.step_all({"w": np.ones((3, 2), np.float32)}, {"w": np.ones((3, 2), np.float32)})
    opt.save(tmp_path / "good.safetensors")
    raw = changed((tmp_path / "good.safetensors").read_bytes(), at(("parameters", "w", "counters", counter), value))
    refuses(raw, tmp_path, f"parameter 'w': counter '{counter}' must be a finite number {needed}, got {value}")

    torch = pytest.importorskip("torch")
    import rlx_optim.torch as front

    weight = torch.nn.Parameter(torch.ones(3, 2))
    live = getattr(front, type(opt).__name__)([("w", weight)], lr=0.1, **settings)
    weight.grad = torch.ones(3, 2)
    live.step()
    before, damaged = copy.deepcopy(live.state_dict()), copy.deepcopy(live.state_dict())
    damaged["state"][0][counter].fill_(value)
    with pytest.raises(ValueError, match=f"'{counter}' of 'w' is .*, expected a finite number {needed}"):
        live.load_state_dict(damaged)
    assert all(torch.equal(v, live.state_dict()["state"][0][k]) for k, v in before["state"][0].items())


def test_a_counter_beyond_the_whole_numbers_is_saved(tmp_path):
    """A sum of weights t^r soon is."""
    opt = rlx_optim.ScheduleFreeSGD(lr=1.0, r=15.0, engine="reference")
    for _ in range(20):
        opt.step_all({"w": np.ones(3, np.float32)}, {"w": np.ones(3, np.float32)})
    opt.save(tmp_path / "a.safetensors")
    again = rlx_optim.load(tmp_path / "a.safetensors")
    assert again._records["w"].counters == opt._records["w"].counters
    assert again._records["w"].counters["weight_sum"] > 2**53


# ---- files mutated at random ------------------------------------------------------------------------------------------------
class Live:
    """A torch optimizer with state, if torch is there: a bad file must not move it."""

    def __init__(self):
        try:
            import torch

            from rlx_optim.torch import Muon
        except ImportError:
            self.opt = None
            return
        self.torch = torch
        params, gradients = problem({"w": (3, 2), "x": (2, 2), "b": (3,)}, steps=2)
        tensors = {k: torch.nn.Parameter(torch.from_numpy(v)) for k, v in params.items()}
        self.opt = Muon(list(tensors.items()), otherwise=rlx_optim.NAdamW(convention="torch"), engine="torch")
        for g in gradients:
            for k, p in tensors.items():
                p.grad = torch.from_numpy(g[k])
            self.opt.step()
        self.saved = self.now()

    def now(self):
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.opt.param_groups]
        return copy.deepcopy((groups, [dict(state) for state in self.opt.state.values()]))

    def check(self, path):
        """Load, which either works or raises a CheckpointError and changes nothing."""
        if "opt" not in self.__dict__:
            self.__init__()
        if self.opt is None:
            return
        opt = self.opt
        self.__dict__.pop("opt")  # whatever comes: the next one starts afresh unless this one is found unchanged
        try:
            opt.load(path)
        except CheckpointError:
            self.opt = opt
            groups, states = self.now()
            self.__dict__.pop("opt")
            assert groups == self.saved[0]
            for a, b in zip(states, self.saved[1], strict=True):
                assert a.keys() == b.keys()
                assert all(self.torch.equal(a[k], b[k]) for k in a)
            self.opt = opt


@pytest.fixture(scope="module")
def live():
    return Live()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(string.printable, max_size=8)
    | st.sampled_from(["m", "w", "b", "Infinity", "adamw", "F32", "lr", "*", 0, 1, 2, 3]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(string.ascii_letters, max_size=5), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@st.composite
def mutated_bytes(draw, raw):
    """Cut, padded, flipped, overwritten, spliced."""
    raw = bytearray(raw)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(raw)))
        match draw(st.sampled_from(["flip", "cut", "insert", "overwrite", "move"])):
            case "flip" if place < len(raw):
                raw[place] ^= draw(st.integers(1, 255))
            case "cut":
                del raw[place : place + draw(st.integers(1, 64))]
            case "insert":
                raw[place:place] = draw(st.binary(min_size=1, max_size=32))
            case "overwrite":
                raw[place : place + 8] = draw(st.binary(min_size=1, max_size=8))
            case "move":
                other = draw(st.integers(0, len(raw)))
                raw[place : place + 16] = raw[other : other + 16]
    return bytes(raw)


@st.composite
def mutated_meaning(draw, raw):
    """An entry of header or manifest replaced, removed or doubled, and the file signed anew: only the checks stand against it."""
    header, manifest, data = parts(raw)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from([header, manifest, manifest["parameters"], manifest["optimizers"]]))
        for _ in range(draw(st.integers(0, 5))):
            inner = place.values() if isinstance(place, dict) else place
            inner = [each for each in inner if isinstance(each, (dict, list)) and each and each is not header["__metadata__"]]
            if not inner:
                break
            place = draw(st.sampled_from(inner))
        keys = [k for k in (place if isinstance(place, dict) else range(len(place))) if k != "__metadata__"]
        if not keys:
            continue
        key = draw(st.sampled_from(keys))
        match draw(st.sampled_from(["replace", "remove", "copy", "rename"])):
            case "replace":
                place[key] = draw(JSON)
            case "remove":
                del place[key]
            case "copy":
                place[key] = copy.deepcopy(place[draw(st.sampled_from(keys))])
            case "rename" if isinstance(place, dict):
                place[draw(st.text(string.ascii_letters + "/", max_size=4))] = place.pop(key)
        if not all(isinstance(manifest.get(k), kind) for k, kind in (("parameters", dict), ("optimizers", list))):
            break
    return rebuilt(header, manifest, data)


def attack(raw, folder, live):
    """Load it everywhere: a CheckpointError or, where the change is harmless, an optimizer."""
    path = folder / "bad.safetensors"
    path.write_bytes(raw)
    with contextlib.suppress(CheckpointError):
        rlx_optim.load(path, engine="reference")
    live.check(path)


QUICK = dict(deadline=None, suppress_health_check=list(HealthCheck), database=None)


@settings(max_examples=200, **QUICK)
@given(st.data())
def test_mutated_bytes(good, tmp_path_factory, live, data):
    raw = data.draw(mutated_bytes(good))
    path = tmp_path_factory.getbasetemp() / "bytes.safetensors"
    path.write_bytes(raw)
    if raw != good:
        with pytest.raises(CheckpointError):
            rlx_optim.load(path, engine="reference")
        live.check(path)


@settings(max_examples=300, **QUICK)
@given(st.data())
def test_mutated_meaning(good, tmp_path_factory, live, data):
    attack(data.draw(mutated_meaning(good)), tmp_path_factory.getbasetemp(), live)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=20_000, **QUICK)
@given(st.data())
def test_twenty_thousand_mutations(good, kron, tmp_path_factory, live, data):
    raw = data.draw(st.sampled_from([good, kron]))
    attack(data.draw(mutated_bytes(raw) | mutated_meaning(raw)), tmp_path_factory.getbasetemp(), live)


def test_a_refused_file_leaves_a_named_optimizer_alone(good, tmp_path):
    """`load` makes a new optimizer; one that is in use has nothing to do with it, and saving over a bad file is fine."""
    opt, raw = opt_and_file(tmp_path)
    before = {k: copies(opt.state(k)) for k in ("w", "x", "b")}
    path = tmp_path / "good.safetensors"
    path.write_bytes(raw[:-1])
    with pytest.raises(CheckpointError):
        rlx_optim.load(path)
    assert all(np.array_equal(before[k][s], opt.state(k)[s]) for k in before for s in before[k])
    opt.save(path)
    assert rlx_optim.load(path).iteration == 2

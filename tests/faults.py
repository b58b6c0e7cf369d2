"""Crashes on purpose, in processes of their own: python faults.py MODE FOLDER [ROUNDS]. Prints one JSON object.

Children are forked from here, where nothing has threads, so that a crash costs milliseconds. test_checkpoint_faults.py runs it.
"""

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

import rlx_optim

#: what a save may ask of the system
CALLS = "openat,read,pread64,write,lseek,fstat,newfstatat,stat,lstat,statx,flock,fsync,fdatasync,rename,renameat,renameat2"
CALLS += ",unlink,unlinkat,close,getdents64,readlink,readlinkat,ioctl,ftruncate,fcntl"


def optimizer(size=64):
    opt = rlx_optim.AdamW(engine="reference")
    opt.step("w", np.ones((size, size), np.float32), np.ones((size, size), np.float32))
    opt.end_iteration()
    return opt


def forked(work):
    """Run work() in a child; its exit code says what became of it: 0 saved, 3 a CheckpointError, 1 anything else."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except rlx_optim.CheckpointError as problem:
        print(problem, file=sys.stderr)
        code = 3
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def temporaries(folder):
    return [name for name in os.listdir(folder) if name.endswith(".rlx-tmp")]


# ---- killed at random times -------------------------------------------------------------------------------------------------
def kill(folder, rounds):
    path, opt = folder / "a.safetensors", optimizer(256)
    opt.save(path)
    rng, acknowledged, moments, left = random.Random(0), 1, Counter(), 0
    for _ in range(rounds):
        reading, writing = os.pipe()

        def work(writing=writing):
            while True:
                opt.end_iteration()
                opt.save(path)
                os.write(writing, b"%d\n" % opt.iteration)

        pid = forked(work)
        os.close(writing)
        time.sleep(rng.random() * 0.03)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with os.fdopen(reading) as said:
            lines = said.read().split()
        acknowledged = int(lines[-1]) if lines else acknowledged
        left += bool(temporaries(folder))
        found = rlx_optim.load(path).iteration
        assert found in (acknowledged, acknowledged + 1), (found, acknowledged)  # renamed, but not yet said
        moments[found - acknowledged] += 1
        acknowledged, opt._iteration = found, found
    opt.save(path)
    return {"rounds": rounds, "died_inside_a_save": left, "renamed_unsaid": moments[1], "temporaries": temporaries(folder)}


# ---- at each system call ----------------------------------------------------------------------------------------------------
def traced(work, *options):
    """Run work() in a child under strace; gives its exit status and the calls it made after its mark."""
    log = Path(sys.argv[2]).parent / f"strace-{os.getpid()}.log"
    pid = forked(lambda: (os.kill(os.getpid(), signal.SIGSTOP), work()))
    os.waitpid(pid, os.WUNTRACED)
    tracer = subprocess.Popen(
        ["strace", "-qq", "-p", str(pid), "-o", str(log), "-e", f"trace={CALLS}", *options],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    for _ in range(500):
        if "TracerPid:\t0" not in Path(f"/proc/{pid}/status").read_text():
            break
        if tracer.poll() is not None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            print(json.dumps({"skip": f"strace cannot attach: {tracer.stderr.read().decode()!r}"}))
            sys.exit(0)
        time.sleep(0.005)
    os.kill(pid, signal.SIGCONT)
    _, status = os.waitpid(pid, 0)
    tracer.wait()
    tracer.stderr.close()
    return status, re.findall(r"^(\w+)\(", log.read_text(), re.MULTILINE)


def strace(folder, rounds):
    """A crash before each system call of a save, then an error from each: the old file or the new one is there, and loads."""
    path, opt = folder / "a.safetensors", optimizer()
    opt.save(path)

    def work():
        opt.end_iteration()
        opt.save(path)

    status, calls = traced(work)
    assert status == 0, status
    places = [(name, n) for name, count in Counter(calls).items() for n in range(1, count + 1)]
    ends = Counter()
    for fault in ("signal=SIGKILL", "error=EIO", "error=ENOSPC"):
        for name, n in places:
            opt.save(path)
            status, _ = traced(work, "-e", f"inject={name}:{fault}:when={n}")
            found = rlx_optim.load(path).iteration
            code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            assert code == -9 if fault.startswith("signal") else code in (0, 3), (name, n, fault, code)
            assert found in (opt.iteration, opt.iteration + 1), (name, n, fault, found)
            assert found == opt.iteration + 1 or code != 0, (name, n, fault)
            ends[f"{fault}: {'new' if found > opt.iteration else 'old'}"] += 1
    opt.save(path)
    return {"places": len(places), "calls": dict(Counter(calls)), "ends": dict(ends), "temporaries": temporaries(folder)}


# ---- no room, no right, several at once ---------------------------------------------------------------------------------------
def refused(opt, path):
    """The message of a save that cannot be."""
    before = sorted(os.listdir(path.parent))
    try:
        opt.save(path)
    except rlx_optim.CheckpointError as problem:
        assert sorted(os.listdir(path.parent)) == before
        return str(problem)
    return "saved"


def limit(folder, rounds):
    path, opt = folder / "a.safetensors", optimizer()
    opt.save(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    opt.end_iteration()
    said = refused(opt, path)
    return {"said": said, "iteration": rlx_optim.load(path).iteration}


def full(folder, rounds):
    """In a file system of 64 KiB: called inside a mount namespace, where `folder` may be mounted on."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        return {"skip": "cannot mount"}
    path, opt = folder / "a.safetensors", optimizer()  # two files of 33 KiB do not fit
    opt.save(path)
    opt.end_iteration()
    disk = refused(opt, path)
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True, capture_output=True)
    read_only = refused(opt, path)
    return {"full": disk, "read_only": read_only, "iteration": rlx_optim.load(path).iteration}


def writers(folder, rounds):
    """Four processes save to one file and rotate in one folder, while this one loads."""
    path, opt = folder / "a.safetensors", optimizer(128)
    opt.save(path)
    opt.save(folder / "run-{iteration}.safetensors", keep=2)

    def work():
        for _ in range(rounds):
            opt.end_iteration()
            opt.save(path)
            opt.save(folder / "run-{iteration}.safetensors", keep=2)

    children, loads = [forked(work) for _ in range(4)], 0
    codes = []
    while children:
        rlx_optim.load(path)
        loads += 1
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            children.remove(pid)
            codes.append(os.WEXITSTATUS(status))
    rlx_optim.load_latest(folder / "run-{iteration}.safetensors")
    names = sorted(os.listdir(folder))
    return {"codes": codes, "loads": loads, "temporaries": temporaries(folder), "kept": len(names) - 1}


if __name__ == "__main__":
    mode, place, *more = sys.argv[1:]
    made = {"kill": kill, "strace": strace, "limit": limit, "full": full, "writers": writers}[mode]
    print(json.dumps(made(Path(place), int(more[0]) if more else 1)))

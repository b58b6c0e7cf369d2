"""Functions of test files, run in one process whose kernels Triton interprets: it starts once for all tests of a pytest process."""

import atexit
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

MARK = "\x1e"  # before a line that is an answer


@functools.cache
def process():
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
    started = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    atexit.register(started.kill)
    return started, errors


def in_the_interpreter(function, module="test_triton"):
    """What a function of a test file returns there."""
    started, errors = process()
    started.stdin.write(json.dumps([module, function]) + "\n")
    started.stdin.flush()
    for line in started.stdout:
        if line.startswith(MARK):
            found, problem = json.loads(line.removeprefix(MARK))
            assert problem is None, problem[-2000:]
            return found
    errors.seek(0)
    process.cache_clear()
    raise AssertionError(f"the process ended: {errors.read()[-2000:]}")


def answered(module, function):
    try:
        return getattr(importlib.import_module(module), function)(), None
    except Exception:
        return None, traceback.format_exc()


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]  # tests, and lab
    for asked in sys.stdin:
        print(MARK + json.dumps(answered(*json.loads(asked))), flush=True)

"""The tests that need a GPU, in several processes at once: `make test-gpu`, or `make test-gpu JOBS=12 ARGS="-k soap"`.

What takes long is compiling, on one core while the GPU is idle. pytest-xdist is not asked for, since nothing is installed where
these run. Tests go out in pieces of a file, those of JAX first, which compiles longest, then those of files with few; who is done
takes the next piece.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed

PIECES, MOST = 8, 12  # into which a file goes, and the most tests of one
PYTEST = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "--no-header"]
COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed)")


def pieces(given: list[str]) -> list[list[str]]:
    """Names of tests that go together."""
    found = subprocess.run([*PYTEST, "--collect-only", "-q", *given], capture_output=True, text=True, check=False)
    files: dict[str, list[str]] = {}
    for line in found.stdout.splitlines():
        if "::" in line:
            files.setdefault(line.split("::")[0], []).append(line)
    if not files:
        sys.exit(found.stdout + found.stderr)
    out = []
    for names in sorted(files.values(), key=lambda names: ("optax" not in names[0], len(names))):
        each = min(MOST, -(-len(names) // PIECES))
        out += [names[i : i + each] for i in range(0, len(names), each)]
    return out


def run(names: list[str], end: float | None) -> tuple[Counter[str], str, float]:
    """What came of some tests: how many of each, what was printed, in how many seconds."""
    began = time.monotonic()
    process = subprocess.Popen([*PYTEST, "-q", "-rs", *names], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = process.communicate(timeout=None if end is None else max(1.0, end - began))
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
    last = said.strip().rpartition("\n")[2]
    counts = Counter({word.rstrip("s") if word == "errors" else word: int(n) for n, word in COUNT.findall(last)})
    if missing := len(names) - counts.total():
        counts["not ended"] = missing
    return counts, said, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="processes at once")
    parser.add_argument("--seconds", type=float, help="after which whatever runs is ended")
    options, given = parser.parse_known_args()
    began = time.monotonic()
    end = None if options.seconds is None else began + options.seconds
    waiting, total, bad = pieces(given), Counter[str](), []
    with ThreadPoolExecutor(options.jobs) as pool:
        under_way = {pool.submit(run, names, end): names for names in waiting}
        for done, each in enumerate(as_completed(under_way), 1):
            counts, said, seconds = each.result()
            total += counts
            told = ", ".join(f"{n} {word}" for word, n in counts.items())
            print(f"[{done}/{len(waiting)}] {under_way[each][0]} … {told}, {seconds:.0f} s", flush=True)
            if counts.keys() - {"passed", "skipped", "xfailed"}:
                bad.append(said)
    print(*bad, sep="\n")
    print(f"{', '.join(f'{n} {word}' for word, n in total.items())} in {time.monotonic() - began:.0f}s")
    sys.exit(bool(bad) or not total["passed"])


if __name__ == "__main__":
    main()

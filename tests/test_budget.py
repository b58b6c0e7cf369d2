"""How much is installed: lines of Python by folder, and class names that are unique."""

import ast
from collections import Counter, defaultdict
from pathlib import Path

import rlx_optim

ROOT = Path(rlx_optim.__file__).parent
#: lines of each folder, at most ("": the files that are in none); a new feature raises its folder's by what it adds; their sum
#: is to be 22,500
LINES = {
    "": 4_980,
    "check": 3_492,
    "checkpoint": 1_700,
    "cli": 1_531,
    "data": 20,
    "engines": 6_220,
    "numpy": 1_160,
    "optax": 1_510,
    "race": 520,
    "rules": 3_000,
    "torch": 7_284,
}


def test_lines_of_each_folder():
    lines = Counter()
    for file in ROOT.rglob("*.py"):
        lines[Path(*file.relative_to(ROOT).parts[:-1][:1]).name] += len(file.read_text(encoding="utf-8").splitlines())
    assert {folder: count for folder, count in lines.items() if count > LINES.get(folder, 0)} == {}


def test_class_names_are_unique():
    files = defaultdict(list)
    for file in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert {name: places for name, places in files.items() if len(places) > 1} == {}

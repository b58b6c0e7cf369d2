"""The shape of the code itself: who imports whom, what a rule may say, what an import costs."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import rlx_optim
from rlx_optim.language import LanguageError, checked
from rlx_optim.program import trace
from rlx_optim.registry import FILES, OURS, spec_class

ROOT = Path(rlx_optim.__file__).parent
HEAVY = {"torch", "jax", "optax", "triton", "scipy", "llvmlite", "rich", "typer", "safetensors"}

#: module (or package) -> modules of this package it may import
MAY = {
    "ops": set(),
    "modifiers": {"ops"},
    "storage": set(),
    "rounding": {"random", "storage"},
    "fields": set(),
    "spec": {"fields", "modifiers", "renamed", "rounding", "storage"},
    "stats": set(),
    "guard": {"spec"},
    "random": set(),
    "pointers": set(),
    "recent": set(),
    "registry": {"spec", "rules"},
    "documentation": {"registry", "spec"},
    "rule": {"spec", "linalg", "ops", "registry", "renamed"},
    "schedules": set(),
    "threads": set(),
    "buckets": set(),
    "routing": {"spec"},
    "data": set(),
    "linalg": {"renamed"},
    "coefficients": set(),
    "splits": {"spec", "storage"},
    "language": {"ops"},
    "program": {"language", "spec", "stats", "ops"},
    "reading": {"engine", "engines", "program", "spec"},
    "partition": {"program", "reading", "rounding", "spec", "storage"},
    "rules": {"basis", "coefficients", "modifiers", "spec", "linalg", "ops"},
    "arrays": {"linalg", "random", "renamed", "storage"},
    "basis": {"linalg"},
    "renamed": {"basis", "linalg"},
    "engine": {"arrays", "language", "program", "spec", "stats", "ops", "random", "rounding", "storage"},
    "engines": {
        "basis", "engine", "engines", "language", "program", "spec", "linalg", "ops", "random", "rounding", "storage", "threads", "pointers", "recent",
    },
    "checkpoint": {
        "numpy", "storage", "guard", "splits", "spec", "registry", "stepping", "routing", "random", "rounding",
    },
    "optax": {
        "numpy", "engine", "engines", "program", "spec", "stepping", "registry", "routing", "random",
        "checkpoint", "documentation", "guard", "rounding", "storage",
    },
    "torch": {
        "numpy", "engine", "engines", "spec", "stepping", "registry", "routing", "random", "checkpoint",
        "partition", "reading", "language", "program", "documentation", "stats", "guard", "splits", "rounding", "storage", "buckets",
        "coefficients", "pointers", "recent",
    },
    "stepping": {"engine", "program", "recent", "rounding", "spec", "stats", "storage"},
    "numpy": {
        "checkpoint", "documentation", "engine", "engines", "guard", "pointers", "program", "registry", "routing", "spec",
        "stats", "stepping", "storage",
    },
    "race": {"numpy", "cli", "data", "engines", "schedules", "__init__"},  # cli: `python -m` alone
    "check": {"numpy", "engine", "engines", "language", "program", "registry", "spec", "stepping"},
    "__main__": {"cli"},
    "cli": {
        "numpy", "buckets", "check", "rounding", "storage", "registry", "threads", "data", "race", "engines", "schedules", "cli",
        "checkpoint", "torch", "optax", "routing", "partition", "spec", "program", "documentation",
        "__init__",
    },
}  # fmt: skip
#: who may import a heavy library, and which, at any depth of the file
HEAVY_IN = {
    "engines": {"llvmlite", "torch", "jax", "triton"},
    "optax": {"jax", "optax"},
    "torch": {"torch"},
    "check": {"torch", "jax", "optax"},
    "cli": {"typer", "rich", "torch", "jax", "optax", "pytorch_optimizer", "matplotlib"},
}


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT)
        yield relative.parts[0].removesuffix(".py"), relative, ast.parse(path.read_text())


def imports(tree, relative):
    """(own modules, foreign modules) that a file imports, anywhere in it."""
    own, foreign = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            foreign |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            foreign.add(node.module.partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = list(relative.parts[:-1])[: len(relative.parts) - node.level]
            target = [*base, *(node.module.split(".") if node.module else [])]
            own |= (
                {target[0]}
                if target
                else {alias.name if (ROOT / f"{alias.name}.py").exists() else "__init__" for alias in node.names}
            )
    return own, foreign


def test_layers():
    for layer, relative, tree in modules():
        own, foreign = imports(tree, relative)
        if layer == "__init__":
            assert not foreign & HEAVY, relative
            continue
        assert own - {layer} <= MAY[layer], f"{relative} imports {own - MAY[layer] - {layer}}"
        assert foreign & HEAVY <= HEAVY_IN.get(layer, set()), f"{relative} imports {foreign & HEAVY}"


def test_an_engine_never_names_an_optimizer():
    names = {kind.title for kind in OURS}
    for layer, relative, tree in modules():
        if layer in ("engine", "engines", "linalg"):
            used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            assert not used & names, relative


# ---- the language of rules ------------------------------------------------------------------------------------------------
def rules():
    """Every function an update maps over coordinates: the first argument of an E.map in a rule's file."""
    for file in sorted(FILES):
        module = __import__(f"rlx_optim.rules.{file}", fromlist=["x"])
        mapped = set()
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "attr", "") == "map"
                and getattr(node.func.value, "id", "") == "E"
            ):
                mapped |= {name.id for name in ast.walk(node.args[0]) if isinstance(name, ast.Name)}
        for name in sorted(mapped & {n for n, f in vars(module).items() if inspect.isfunction(f)}):
            yield pytest.param(getattr(module, name), id=f"{file}.{name}")


@pytest.mark.parametrize("rule", list(rules()))
def test_rules_stay_inside_their_language(rule):
    text = checked(rule)
    assert text.takes
    assert text.gives


def test_a_rule_is_an_ordinary_function():
    from rlx_optim.rules.lion import lion

    u, m = lion(2.0, 0.0, beta1=0.9, alpha1=0.1, beta2=0.99, alpha2=0.01)
    assert (u, m) == (1.0, 0.02)


def test_an_elementwise_update_reads_structural_fields_alone():
    """Tensors of one bundle may differ in every other field, so `update` must not look at it."""
    adamw = spec_class("adamw")

    class Wrong(adamw):
        def update(self, E, x):
            return super().update(E, x) if self.lr > 0 else x

    with pytest.raises(LanguageError, match=r"Wrong\.update reads 'lr', in which the tensors of one pass may differ"):
        trace(Wrong(), Wrong().slots((3,)))


# ---- imports ------------------------------------------------------------------------------------------------------------
def test_importing_the_package_imports_no_engine():
    code = f"import sys, rlx_optim; print(sorted({HEAVY!r} & set(sys.modules)), [m for m in sys.modules if 'rlx_optim.engines.' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"
    code = "import sys, rlx_optim; rlx_optim.Muon(); rlx_optim.AdamW(engine='cpu'); print('llvmlite' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"  # an engine is imported by the first step


def test_importing_the_torch_front_end_imports_no_compiler():
    """torch._dynamo takes longer to import than everything else together; torch imports it when something is compiled."""
    code = "import sys, rlx_optim.torch; print('torch._dynamo' in sys.modules, 'sympy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False False"


def test_the_stub_is_what_the_specs_say():
    tools = ROOT.parent.parent / "lab" / "stubs.py"
    if not tools.exists():
        pytest.skip("installed package")
    namespace = {"__name__": "stubs", "__file__": str(tools)}
    exec(compile(tools.read_text(), str(tools), "exec"), namespace)
    for path, make in namespace["STUBS"].items():
        assert make() == path.read_text(), "run python -m lab.stubs"


def test_public_names_are_there():
    for name in rlx_optim.__all__:
        assert getattr(rlx_optim, name) is not None
    assert (ROOT / "py.typed").exists()

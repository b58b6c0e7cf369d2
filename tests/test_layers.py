"""The shape of the code itself: who imports whom, what a rule may say, what an import costs."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import rlx_optim
from rlx_optim import vocabulary
from rlx_optim.engine import signature
from rlx_optim.named import spec_class
from rlx_optim.registry import OPTIMIZERS

ROOT = Path(rlx_optim.__file__).parent
HEAVY = {"numba", "torch", "jax", "optax", "triton", "scipy", "llvmlite", "rich", "typer", "safetensors"}

#: module (or package) -> modules of this package it may import
MAY = {
    "vocabulary": set(),
    "spec": set(),
    "random": set(),
    "registry": set(),
    "schedules": set(),
    "threads": set(),
    "routing": set(),
    "data": set(),
    "helpers": {"engines"},
    "linalg": set(),
    "sharing": {"engine", "program", "spec"},
    "settings": {"spec"},
    "admission": {"spec"},
    "rules": {"spec", "linalg", "vocabulary"},
    "language": {"vocabulary"},
    "program": {"language", "spec", "vocabulary"},
    "engine": {"language", "program", "spec", "linalg", "vocabulary", "random"},
    "engines": {"engine", "engines", "language", "program", "spec", "linalg", "vocabulary", "random", "threads"},
    "checkpoint": {"spec", "named", "registry", "optimizer", "settings", "stepping", "routing", "random"},
    "optax": {
        "engine", "engines", "program", "spec", "stepping", "named", "registry", "optimizer", "admission", "routing", "random",
        "checkpoint",
    },
    "torch": {
        "engine", "engines", "spec", "stepping", "named", "registry", "optimizer", "admission", "routing", "random", "checkpoint",
        "sharing", "language", "program",
    },
    "stepping": {"engine", "program", "spec"},
    "constructs": {"language", "spec", "vocabulary"},
    "conformance": {"constructs", "engine", "engines", "language", "program", "spec", "stepping"},
    "checking": {"conformance", "curvature", "engines", "optimizer", "program", "spec"},
    "family": {"engine", "engines", "spec", "settings", "admission", "stepping"},
    "optimizer": {"engine", "engines", "family", "spec", "settings", "admission", "routing", "stepping", "checkpoint", "program"},
    "curvature": {"engine", "program", "spec", "optimizer", "admission", "stepping"},
    "named": {"optimizer", "curvature", "registry", "spec"},
    "race": {"cli", "curvature", "data", "engines", "named", "optimizer", "schedules", "torch", "__init__"},  # cli: `python -m` alone
    "cli": {
        "named", "optimizer", "curvature", "registry", "threads", "helpers", "data", "race", "engines", "schedules", "cli", "checkpoint", "torch",
        "optax", "sharing", "spec", "checking", "conformance", "constructs", "program", "__init__",
    },
}  # fmt: skip
#: who may import a heavy library, and which, at any depth of the file
HEAVY_IN = {
    "engine": {"scipy"},
    "engines": {"numba", "llvmlite", "scipy", "torch", "jax", "triton"},
    "optax": {"jax", "optax"},
    "torch": {"torch"},
    "race": {"torch"},
    "cli": {"typer", "rich", "numba", "torch", "jax", "optax", "pytorch_optimizer", "matplotlib"},
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
    names = {title for _, title, _ in OPTIMIZERS.values()}
    for layer, relative, tree in modules():
        if layer in ("engine", "engines", "linalg"):
            used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            assert not used & names, relative


# ---- the language of rules ------------------------------------------------------------------------------------------------
STATEMENTS = (ast.Assign, ast.Return)
EXPRESSIONS = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, ast.Name, ast.Tuple, ast.Constant)
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.USub, ast.Gt, ast.Lt, ast.Load, ast.Store)


def rules():
    """Every function an update maps over coordinates: the first argument of an E.map in a rule's file."""
    for file in sorted({file for file, _, _ in OPTIMIZERS.values()}):
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


def lint(text):
    """What in a rule is outside its language: arithmetic, vocabulary, local names, comparisons; numbers in comparisons alone."""
    (function,) = ast.parse(text).body
    problems = []
    for statement in function.body:
        if not isinstance(statement, STATEMENTS):
            problems.append(ast.unparse(statement))
            continue
        compared = {id(c) for node in ast.walk(statement) if isinstance(node, ast.Compare) for c in node.comparators}
        for node in ast.walk(statement.value):
            allowed = isinstance(node, EXPRESSIONS + OPERATORS) and not (
                isinstance(node, ast.Constant) and id(node) not in compared
            )
            if isinstance(node, ast.Call):
                allowed = isinstance(node.func, ast.Name) and node.func.id in vocabulary.RULE and not node.keywords
            if not allowed:
                problems.append(ast.unparse(node))
    return problems


@pytest.mark.parametrize("rule", list(rules()))
def test_rules_stay_inside_their_language(rule):
    assert lint(inspect.getsource(rule)) == []
    takes, gives = signature(rule)
    assert takes
    assert gives
    local = set(rule.__code__.co_varnames)
    assert set(rule.__code__.co_names) <= set(vocabulary.RULE)
    assert set(gives) <= local


@pytest.mark.parametrize(
    "body", ["for _ in p: pass", "q = 0.5 * p", "q = len(p)", "q = p ** p", "q = p if p > 0 else p", "q = p[0]"]
)
def test_the_lint_notices(body):
    assert lint(f"def rule(p):\n    {body}\n    return p")


def test_a_rule_is_an_ordinary_function():
    from rlx_optim.rules.lion import lion

    p, m = lion(1.0, 2.0, 0.0, shrink=0.0, lr=0.1, beta1=0.9, alpha1=0.1, beta2=0.99, alpha2=0.01)
    assert (p, m) == (0.9, 0.02)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_elementwise_update_reads_structural_fields_alone(name):
    """Tensors of one bundle may differ in every other field, so `update` must not look at it."""
    kind = spec_class(name)
    if kind.matrix:
        return
    given = {"lr": 0.01} if name == "sgd" else {}
    spec = kind(**given)
    read = set()

    class Spy(kind):
        def __getattribute__(self, field):
            if field in kind.fields:
                read.add(field)
            return super().__getattribute__(field)

    spy = Spy(**given)

    class Nothing:
        def __getattr__(self, word):
            return lambda *a, **k: {}

    read.clear()
    spy.update(Nothing(), {"row": 1})
    spy.update(Nothing(), {})
    numeric = {f for f in read if not kind.fields[f].structural}
    for field in numeric:  # a number may be read only for what its structure says of it
        values = {**spec.values(), field: 0.123}
        assert (
            kind(**values).structure()
            != kind(**{**values, field: None if "None" in kind.fields[field].annotation else 0.0}).structure()
        )


# ---- imports ------------------------------------------------------------------------------------------------------------
def test_importing_the_package_imports_no_engine():
    code = f"import sys, rlx_optim; print(sorted({HEAVY!r} & set(sys.modules)), [m for m in sys.modules if 'rlx_optim.engines.' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"
    code = "import sys, rlx_optim; rlx_optim.Muon(); rlx_optim.AdamW(engine='cpu'); print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"  # an engine is imported by the first step


def test_the_stub_is_what_the_specs_say():
    tools = ROOT.parent.parent / "tools" / "stubs.py"
    if not tools.exists():
        pytest.skip("installed package")
    namespace = {"__name__": "stubs", "__file__": str(tools)}
    exec(compile(tools.read_text(), str(tools), "exec"), namespace)
    for path, make in namespace["STUBS"].items():
        assert make() == path.read_text(), "run tools/stubs.py"


def test_public_names_are_there():
    for name in rlx_optim.__all__:
        assert getattr(rlx_optim, name) is not None
    assert (ROOT / "py.typed").exists()

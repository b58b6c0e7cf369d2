"""The engines against each other, and what only shows when several threads, processes or engines are at work."""

import os
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from importlib.metadata import EntryPoint

import numpy as np
import pytest
from helpers import ELEMENTWISE, MATRIX, NAMES, REDUCING, SHAPES, copies, distance, feed, make, problem, run, same_bits

import rlx_optim
from rlx_optim import engines
from rlx_optim.engine import ArrayEngine, Engine

#: structural settings that pick another rule, beside the defaults
VARIANTS = [
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("sgd", {"momentum": 0.9, "dampening": 0.3}),
    ("adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("adamw", {"amsgrad": True}),
    ("nadamw", {"convention": "algoperf"}),
    ("nadamw", {"convention": "torch"}),
    ("radam", {"convention": "paper", "weight_decay": 0.1, "betas": (0.9, 0.99)}),
    ("radam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("stableadamw", {"convention": "first", "clip": 0.5}),
    ("ademamix", {"alpha_warmup": 30, "beta3_warmup": 50, "weight_decay": 0.1}),
    ("adan", {"max_grad_norm": 0.5, "no_prox": True, "weight_decay": 0.1}),
    ("adopt", {"decouple": True, "weight_decay": 0.1}),
    ("laprop", {"convention": "timm", "weight_decay": 0.1}),
    ("lars", {"convention": "timm", "nesterov": True, "weight_decay": 0.1}),
    ("lars", {"trust_coefficient": None, "lr": 0.01}),
    ("lamb", {"bias_correction": False, "trust_clip": 2.0}),
    ("adafactor", {"beta1": 0.9, "weight_decay": 0.1}),
    ("adafactor", {"convention": "torch", "lr": 0.01, "weight_decay": 0.1}),
    ("adafactor", {"convention": "rlx"}),
    ("mars", {"variant": "lion", "lr": 1e-3}),
    ("mars", {"clip_norm": None, "otherwise": None}),
    ("muon", {"nesterov": False, "convention": "moonlight"}),
    ("muon", {"convention": "rlx", "lr": 1e-3}),
    ("soap", {"precondition_1d": True, "max_precond_dim": 30}),
    ("soap", {"merge_dims": True, "max_precond_dim": 36, "shampoo_beta": 0.9}),
    ("kronpsgd", {"memory_save_mode": "one_diag", "weight_decay": 0.1}),
    ("kronpsgd", {"memory_save_mode": "all_diag", "momentum_into_precond_update": False}),
    ("normuon", {"convention": "dion", "weight_decay": 0.1}),
    ("normuon", {"convention": "speedrun", "weight_decay": 0.1}),
    ("scion", {"momentum": 0.1, "unconstrained": True, "max_scale": True}),
    ("scion", {"norm": "sign", "momentum": 0.1}),
    ("scion", {"norm": "colnorm"}),
    ("scion", {"norm": "rownorm", "transpose": True}),
    ("schedulefreeadamw", {"warmup_steps": 4, "weight_decay": 0.1, "r": 1.0}),
    ("schedulefreesgd", {"warmup_steps": 4, "weight_decay": 0.1, "lr": 0.1}),
    ("lion", {"cautious": True, "decay": "cautious", "weight_decay": 0.1}),
    ("adafactor", {"cautious": True, "decay": "cautious", "weight_decay": 0.1}),
    ("adamw", {"cautious": True, "decay": "hyperball"}),
    ("muon", {"cautious": True, "decay": "hyperball", "otherwise": None, "convention": "rlx"}),
]
EVERY = [(name, {}) for name in NAMES] + VARIANTS


def ids(case):
    return "-".join([case[0], *(f"{k}={v}" for k, v in case[1].items())]) if isinstance(case, tuple) else str(case)


@pytest.mark.parametrize("case", [c for c in EVERY if c[0] in ELEMENTWISE and "hyperball" not in c[1].values()], ids=ids)
def test_cpu_in_float64_is_the_reference_bit_for_bit(case):
    name, settings = case
    params, gradients = problem(steps=12)
    want = run(make(name, engine="reference", **settings), copies(params), gradients)
    got = run(make(name, engine="cpu", precision="float64", **settings), copies(params), gradients)
    assert same_bits(got, want)


@pytest.mark.parametrize("case", EVERY, ids=ids)
def test_cpu_in_float32_follows_the_reference_for_100_steps(case):
    name, settings = case
    params, gradients = problem(steps=100)
    want = run(make(name, engine="reference", **settings), copies(params), gradients)
    got = run(make(name, engine="cpu", **settings), copies(params), gradients)
    assert distance(got, want, params) < (1e-3 if name in MATRIX else 2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_results_do_not_depend_on_the_number_of_threads(name):
    shapes = {"w": (300, 200), "v": (100, 700), "b": (50_000,)}
    if name in MATRIX:
        shapes = {"w": (60, 40), "b": (50_000,)}
    params, gradients = problem(shapes, steps=3)
    results = []
    for n in (1, 2):
        rlx_optim.set_threads(n)
        try:
            results.append(run(make(name, engine="cpu"), copies(params), gradients))
        finally:
            rlx_optim.set_threads(None)
    assert distance(results[0], results[1], params) == 0 if name in MATRIX else same_bits(*results)


@pytest.mark.parametrize("name", NAMES)
def test_one_by_one_equals_all_at_once(name):
    """step in any order and step_all give the same bits: sums and noise do not depend on what else is stepped."""
    params, gradients = problem(steps=4)
    together, apart = copies(params), copies(params)
    run(make(name, engine="cpu"), together, gradients)
    opt = make(name, engine="cpu")
    for t, grads in enumerate(gradients):
        feed(opt, apart, t)
        for k in reversed(grads):
            opt.step(k, apart[k], grads[k])
        opt.end_iteration()
    assert same_bits(apart, together)


def test_nothing_of_the_cpu_engine_runs_on_the_reference(monkeypatch):
    """Every coordinate of every rule goes through a compiled kernel: the array-by-array map is never entered."""
    monkeypatch.setattr(ArrayEngine, "map", lambda *a, **k: pytest.fail("ran array by array"))
    for name, settings in EVERY:
        opt = make(name, engine="cpu", **settings)
        params, gradients = problem(steps=2)
        run(opt, params, gradients)
        report = opt.engine_report()
        assert all(text.startswith("cpu: compiled by LLVM") for text in report.values())
        assert ("BLAS" in next(iter(report.values()))) == (name in MATRIX)


def test_the_reference_says_so():
    assert rlx_optim.AdamW(engine="reference").engine_report() == {"AdamW": "reference: NumPy in float64, tensor by tensor"}


@pytest.mark.parametrize("name", ELEMENTWISE + REDUCING)
def test_steps_allocate_nothing_that_grows_with_the_tensors(name):
    """After the first step, the peak of new memory during a step stays far below one buffer of the model."""
    shapes = {"a": (700, 600), "b": (400_000,)}  # MARS hands b to AdamW
    params, gradients = problem(shapes, steps=1)
    opt = make(name, engine="cpu")
    if name == "sophia":
        for k, p in params.items():
            opt.update_hessian(k, np.ones_like(p))
    for _ in range(2):
        opt.step_all(params, gradients[0])
    tracemalloc.start()
    opt.step_all(params, gradients[0])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 60_000


@pytest.mark.parametrize("name", ["lamb", "mars"])
def test_no_scratch_of_the_models_size(name):
    """What a first step allocates is the state and little more."""
    params, gradients = problem({"a": (1000, 1000)}, steps=1)
    make(name, engine="cpu").step_all(*(dict(x) for x in (problem({"a": (2, 2)})[0], problem({"a": (2, 2)})[0])))  # compile
    opt = make(name, engine="cpu")
    tracemalloc.start()
    opt.step_all(params, gradients[0])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert opt.state_bytes() <= peak < opt.state_bytes() + 500_000


def test_two_threads_step_two_optimizers():
    shapes = {"w": (400, 300), "b": (1000,)}
    params, gradients = problem(shapes, steps=30)
    want = run(make("adamw", engine="cpu"), copies(params), gradients)
    results, failures = [copies(params) for _ in range(4)], []

    def work(mine):
        try:
            run(make("adamw", engine="cpu"), mine, gradients)
        except BaseException as problem:
            failures.append(problem)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert all(same_bits(mine, want) for mine in results)


def started(code, timeout=120):
    """The words that a program prints; it must end, and well."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_forked_child_steps_on():
    """After the parent stepped on several threads, which the child has not, while others step and compile."""
    code = """
        import os, sys, threading, warnings
        import numpy as np, rlx_optim
        warnings.simplefilter("ignore")  # that a process with threads forks
        def go(opt, p, g, n=3):
            for _ in range(n): opt.step_all(p, g)
        def fresh(name="adamw"):
            return rlx_optim.create(name, lr=0.1, engine="cpu"), {"w": np.ones((500, 400), np.float32)}
        g = {"w": np.full((500, 400), 0.5, np.float32)}
        opt, p = fresh(); go(opt, p, g)
        others = [fresh() for _ in range(3)]
        threads = [threading.Thread(target=go, args=(o, q, g, 200)) for o, q in others]
        threads += [threading.Thread(target=go, args=(*fresh(name), g)) for name in ("lion", "adan", "lamb", "radam")]
        [t.start() for t in threads]
        children = []
        for _ in range(5):
            if not (child := os.fork()):
                go(opt, p, g)
                go(*fresh("nadamw"), g)  # compiles
                os._exit(0 if abs(float(p["w"][0, 0]) - 0.4) < 0.01 else 3)
            children.append(child)
        [t.join() for t in threads]
        assert len({q["w"].tobytes() for _, q in others}) == 1
        print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
    """
    assert started(code) == ["0"] * 5


def test_an_interpreter_ends_while_threads_step():
    code = """
        import threading, time
        import numpy as np, rlx_optim
        p, g = {"w": np.ones((500, 400), np.float32)}, {"w": np.ones((500, 400), np.float32)}
        opt = rlx_optim.AdamW(engine="cpu")
        def go():
            while True: opt.step_all(p, g)
        threading.Thread(target=go, daemon=True).start()
        time.sleep(0.5)
        print("done")
    """
    assert started(code) == ["done"]


def test_helpers_that_never_come_are_not_waited_for(monkeypatch):
    """Nor is there harm in one that comes when all is done."""
    from rlx_optim.engines.cpu import runtime

    pool = runtime.Pool()
    monkeypatch.setattr(runtime, "_pool", pool)
    monkeypatch.setattr(pool, "start_helpers", lambda wanted: None)
    params, gradients = problem({"w": (700, 600)}, steps=2)
    want = run(make("adamw", engine="cpu"), copies(params), gradients)
    rlx_optim.set_threads(2)
    monkeypatch.setattr(rlx_optim.threads, "available", lambda: 2)
    try:
        got = run(make("adamw", engine="cpu"), copies(params), gradients)
    finally:
        rlx_optim.set_threads(None)
    assert same_bits(got, want)
    assert pool.tasks.qsize() >= 2
    assert all(pool.tasks.get().closed for _ in range(pool.tasks.qsize()))


def test_an_interrupt_waits_for_the_helpers(monkeypatch):
    """Else they would write into arrays that their owner has freed."""
    from rlx_optim.engines.cpu import runtime

    pool, log, entered, go_on = runtime.Pool(), [], threading.Event(), threading.Event()

    class Interrupted:
        def __init__(self, lock):
            self.lock = lock

        def acquire(self):
            if not log:
                log.append("interrupted")
                go_on.set()
                raise KeyboardInterrupt
            return self.lock.acquire()

        def release(self):
            log.append("done")
            self.lock.release()

    class Slow:
        where = 0

        def function(self, where):
            if threading.current_thread() is threading.main_thread():
                assert entered.wait(10)
                return
            pool_task[0].done = Interrupted(pool_task[0].done)
            entered.set()
            assert go_on.wait(10)

    pool_task, make_task = [], runtime.Task
    monkeypatch.setattr(runtime, "Task", lambda call: pool_task.append(make_task(call)) or pool_task[0])
    with pytest.raises(KeyboardInterrupt):
        pool.run(Slow(), 2)
    assert log == ["interrupted", "done"]


def test_nothing_is_written(tmp_path):
    """Neither code nor a cache, wherever home, the user's cache and temporary files are."""
    code = """
        import numpy as np, rlx_optim
        rlx_optim.SOAP(engine="cpu").step_all({"w": np.ones((5, 4), np.float32)}, {"w": np.ones((5, 4), np.float32)})
    """
    folder = {"HOME", "TMPDIR", "XDG_CACHE_HOME", "RLX_OPTIM_CACHE"}
    environment = {**os.environ, **dict.fromkeys(folder, str(tmp_path)), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env=environment, cwd=tmp_path)
    assert not list(tmp_path.iterdir())


def test_auto_falls_back_to_the_reference_and_says_so_once(monkeypatch):
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None)
    engines._automatic.cache_clear()
    try:
        with pytest.warns(UserWarning, match="llvmlite is not installed"):
            assert rlx_optim.AdamW().engine.name == "reference"
        assert rlx_optim.Lion().engine.name == "reference"  # no second warning: pytest.warns would be needed
    finally:
        engines._automatic.cache_clear()


class Single(ArrayEngine):
    """A third party's engine: NumPy, but in float32."""

    name = "single"
    dtype = np.float32


@pytest.fixture
def third_party(monkeypatch):
    point = EntryPoint("single", f"{__name__}:Single", "rlx_optim.engines")

    def entry_points(group, name=None):
        return [point] if group == "rlx_optim.engines" and name in (None, "single") else []

    monkeypatch.setattr(engines, "entry_points", entry_points)
    monkeypatch.setattr(EntryPoint, "load", lambda self: Single)
    engines._engine.cache_clear()
    yield
    engines._engine.cache_clear()


@pytest.mark.parametrize("name", NAMES)
def test_a_third_partys_engine_runs_all(name, third_party):
    assert "single" in rlx_optim.list_engines()
    params, gradients = problem(steps=10)
    # without float64, an engine may differ where SOAP's first basis is not determined: rotate the short dimensions alone
    settings = {"max_precond_dim": 6} if name == "soap" else {}
    opt = make(name, engine="single", **settings)
    assert isinstance(opt.engine, Engine)
    got = run(opt, copies(params), gradients)
    want = run(make(name, engine="reference", **settings), copies(params), gradients)
    assert distance(got, params, want) > 0
    assert distance(got, want, params) < (2e-3 if name in MATRIX else 1e-4)
    assert "Single" in next(iter(opt.engine_report().values()))


def test_an_engine_object_is_taken_as_it_is():
    opt = rlx_optim.Muon(engine=Single())
    assert isinstance(opt.engine, Single)
    assert isinstance(opt.otherwise.engine, Single)  # it runs on its owner's engine


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize(("n", "columns"), [(1, 1), (5, 7), (97, 33), (450, 70)])
def test_triangular_algebra(n, columns, precision):
    """Small blocks by a loop, larger ones by recursion; any strides."""
    rng, engine = np.random.default_rng(0), engines.get_engine("cpu", precision)
    R = np.triu(rng.standard_normal((2, n, n)) / n + np.eye(n)).astype(precision)
    X = rng.standard_normal((2, n, columns)).astype(precision)
    before = X.copy()
    want = np.linalg.solve(R.mT.astype(np.float64), X.astype(np.float64))
    np.testing.assert_allclose(engine.solve_triangular(R, X), want, rtol=0, atol=2e-5 if precision == "float32" else 1e-12)
    assert (before == X).all()


@pytest.mark.parametrize("kind", ["gaussian", "few directions", "tiny", "steep"])
@pytest.mark.parametrize("shape", [(24, 96), (96, 24), (1, 7), (30, 61), (16, 16)])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7])
def test_the_gram_form_equals_plain_newton_schulz(shape, kind, steps):
    """Also where rounding is amplified: few dominant directions, tiny numbers, singular values over many decades."""
    from rlx_optim import linalg

    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape)
    if kind == "few directions":
        x = 1e-3 * x + 10 * rng.standard_normal((shape[0], 1)) @ rng.standard_normal((1, shape[1]))
    if kind == "steep":
        u, s, v = np.linalg.svd(x, full_matrices=False)
        x = u * 10.0 ** -np.linspace(0, 5, len(s)) @ v
    X = (x * (1e-20 if kind == "tiny" else 1.0)).astype(np.float32)[None]
    coefficients = (3.4445, -4.7750, 2.0315)
    want = linalg.newton_schulz(engines.get_engine("reference"), X.astype(np.float64), steps, coefficients, 1e-30)
    got = engines.get_engine("cpu").orthogonalize(X, steps, coefficients, 1e-30)
    plain = linalg.newton_schulz(Single(), X, steps, coefficients, 1e-30)
    floor = np.linalg.norm(plain - want)  # what float32 does to the plain form; it grows with the steps
    assert np.linalg.norm(got - want) < 4 * floor + 2e-5 * np.linalg.norm(want)
    assert np.linalg.norm(got - want) < 1e-4 * np.linalg.norm(want) or steps > 5


def test_shapes_of_the_problem_cover_what_we_promise():
    assert {len(shape) for shape in SHAPES.values()} == {0, 1, 2, 4}


# ---- SOAP's basis, where dimensions are large ------------------------------------------------------------------------------
@pytest.mark.parametrize("rank", [600, 80, 1])
def test_a_large_basis_is_that_of_qr(rank):
    """Orthonormal whatever the rank, and NumPy's in float64 up to signs where L determines it."""
    rng = np.random.default_rng(rank)
    n = 600
    G = rng.standard_normal((n, rank))
    L = (G @ G.T / rank).astype(np.float32)[None]
    old = np.linalg.qr(rng.standard_normal((1, n, n)))[0].astype(np.float32)
    Q = np.linalg.eigh(L + 0.02 * np.eye(n, dtype=np.float32))[1][..., ::-1].copy() if rank == n else old
    X = L @ Q
    got = np.asarray(rlx_optim.create("soap", engine="cpu")._engine.qr(X), np.float64)
    want = np.linalg.qr(X.astype(np.float64))[0]
    assert np.abs(got.mT @ got - np.eye(n)).max() < 1e-5
    sure = 300 if rank == n else max(1, rank // 2)  # the leading directions
    signs = np.sign((got * want).sum(-2))
    assert np.abs(got * signs[:, None] - want)[..., :sure].max() < 2e-3

"""The triton engine. Without a GPU its kernels run in Triton's interpreter, in a process of its own; with one, compiled (`-m gpu`)."""

import gc
import json
import os
import subprocess
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from helpers import MATRIX, copies, distance, problem  # noqa: E402
from interpreter import in_the_interpreter  # noqa: E402
from test_engines import EVERY  # noqa: E402

import rlx_optim  # noqa: E402
import rlx_optim.torch as front  # noqa: E402
from rlx_optim.engines.triton_.matrices import TritonArrays  # noqa: E402
from rlx_optim.engines.triton_.replay import urgency  # noqa: E402
from rlx_optim.registry import spec_class  # noqa: E402

#: settings under which the front end does what the named API does
AS_NAMED = {"sgd": {"lr": 0.01}, "adafactor": {"lr": None, "eps": (1e-30, 1e-3), "convention": "paper"}}
#: rules whose step a CUDA graph can capture by itself
CAPTURABLE = [case for case in EVERY if not spec_class(case[0]).step_dependent]
#: those whose decisions the host takes
DECIDING = [case for case in EVERY if spec_class(case[0]).step_dependent]
#: a case of each optimizer, and of each kind of program: enough where kernels are interpreted, block by block
ONCE = list({name: (name, settings) for name, settings in reversed(EVERY)}.values())
KINDS = ("sgd", "adamw", "nadamw", "lamb", "adafactor", "sophia", "prodigy", "schedulefreeadamw", "muon", "soap", "kronpsgd")
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def walk(case, device, dtype=torch.float32, steps=4, shapes=None):
    """(distance from the reference) after some steps of a case through the torch front end on the triton engine."""
    name, settings = case
    settings = {**AS_NAMED.get(name, {}), **settings}
    settings = {**settings, "max_precond_dim": 6} if name == "soap" else settings  # dimensions whose first basis is determined
    params, gradients = problem(*([shapes] if shapes else []), steps=steps)
    tensors = {k: torch.nn.Parameter(torch.tensor(v).to(device, dtype)) for k, v in params.items()}
    start = {k: p.detach().float().cpu().numpy().copy() for k, p in tensors.items()}
    reference, want = rlx_optim.create(name, engine="reference", **settings), copies(start)
    opt = getattr(front, spec_class(name).__name__)(list(tensors.items()), engine="triton", **settings)
    for grads in gradients:
        for k, p in tensors.items():
            p.grad = torch.tensor(grads[k]).to(device, dtype)
        opt.step()
        reference.step_all(want, {k: p.grad.float().cpu().numpy().copy() for k, p in tensors.items()})
    assert all(text.startswith("triton") for text in opt.engine_report().values())
    return float(distance({k: p.detach().float().cpu().numpy() for k, p in tensors.items()}, want, start))


# ---- without a GPU: the interpreter ------------------------------------------------------------------------------------
SHAPES = {"long": (2100,), "block": (1024,), "w": (33, 7), "again": (33, 7), "wide": (130, 270), "s": (), "one": (1,)}


@pytest.mark.parametrize(("function", "cases"), [("each_rule", ONCE), pytest.param("every_rule", EVERY, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_every_rule_in_the_interpreter(function, cases):
    """Tensors of every size around a block, in one process; all variants in make test-all."""
    results = in_the_interpreter(function)
    assert len(results) == len(cases)
    bars = {case: 1e-4 if case.split()[0] == "soap" else 2e-3 if case.split()[0] == "muon" else 1e-5 for case in results}
    assert {case: gap for case, gap in results.items() if not gap < bars[case]} == {}


def each_rule():
    return every_rule(ONCE)


def every_rule(cases=EVERY):
    warnings.simplefilter("ignore")
    shapes = {k: v for k, v in SHAPES.items() if k != "wide"}
    gaps = {f"{name} {settings}": walk((name, settings), "cpu", steps=3, shapes=shapes) for name, settings in cases}
    oblong = [case for case in cases if case[0] in ("adafactor", "lamb")]
    for name, settings in oblong:  # several tiles, none of them full
        gaps[f"{name} {settings}"] = max(gaps[f"{name} {settings}"], walk((name, settings), "cpu", steps=2, shapes=SHAPES))
    return gaps


def test_storage_and_strides_in_the_interpreter():
    """bfloat16 beside float32, transposed memory and tensors that are not matrices, for sweeps, tiles and piles."""
    assert {k: v for k, v in in_the_interpreter("storage").items() if not v < 1e-2} == {}


def storage():
    warnings.simplefilter("ignore")
    found = {}
    for name in ("AdamW", "Lamb", "Adafactor", "Muon"):
        rng = torch.Generator().manual_seed(0)
        starts = [torch.randn(40, 30, generator=rng), torch.randn(30, 40, generator=rng), torch.randn(9, generator=rng)]
        starts.append(torch.randn(4, 3, 2, 2, generator=rng))
        grads = [torch.randn(s.shape, generator=rng) for s in starts]
        results = []
        for cast in (lambda k, t: t, lambda k, t: t.bfloat16() if k == 0 else t.T.contiguous().T if k == 1 else t):
            params = [torch.nn.Parameter(cast(k, t.bfloat16().float() if k == 0 else t).clone()) for k, t in enumerate(starts)]
            for k, (p, g) in enumerate(zip(params, grads, strict=True)):
                p.grad = cast(k, g.bfloat16().float() if k == 0 else g)
            opt = getattr(front, name)(params, lr=0.1, engine="triton")
            opt.step()
            opt.step()
            results.append([p.detach().float() for p in params])
        for k, (a, b) in enumerate(zip(*results, strict=True)):
            found[f"{name} {k}"] = float((a - b).abs().max() / a.abs().max())
    return found


@pytest.mark.parametrize("function", ["capturable_kinds", pytest.param("capturable", marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_capturable_in_the_interpreter(function):
    """Counts on the device give what counts on the host give, with groups that differ."""
    results = in_the_interpreter(function)
    assert len(results) == len(EVERY if function == "capturable" else KINDS)
    assert {case: gap for case, gap in results.items() if not gap < 1e-6} == {}


def two_groups(case, capturable, device="cpu", steps=4, nonfinite="propagate"):
    """Parameters after some steps of two groups, and the optimizer."""
    name, settings = case
    params, gradients = problem({"w": (33, 7), "b": (40,), "big": (40, 30)}, steps=steps)
    tensors = {k: torch.nn.Parameter(torch.tensor(v, device=device)) for k, v in params.items()}
    groups = [{"params": [(k, tensors[k])], **({"lr": 0.02} if k == "b" else {})} for k in tensors]
    groups = list(tensors.items()) if name in ("muon", "mars") else groups
    made = getattr(front, spec_class(name).__name__)
    settings = {**AS_NAMED.get(name, {}), **settings}
    opt = made(groups, engine="triton", capturable=capturable, nonfinite=nonfinite, **settings)
    return tensors, opt, gradients, params


def capturable_kinds():
    return capturable([case for case in ONCE if case[0] in KINDS])


def capturable(cases=EVERY):
    warnings.simplefilter("ignore")
    found = {}
    for case in cases:
        ends = []
        for flag in (False, True):
            tensors, opt, gradients, start = two_groups(case, flag)
            for grads in gradients:
                give(tensors, grads)
                opt.step()
            ends.append({k: p.detach().numpy().copy() for k, p in tensors.items()})
            assert all(float(opt.state[p]["step"]) == len(gradients) for p in tensors.values())
        found[f"{case[0]} {case[1]}"] = float(distance(ends[1], ends[0], start))
    return found


def give(tensors, grads):
    for k, p in tensors.items():
        p.grad = torch.tensor(grads[k], device=p.device)


def test_numbers_on_the_device_are_those_of_the_host_in_the_interpreter():
    """A replayed step reads its numbers from the device, the first steps have them from the host: no bit may differ."""
    assert in_the_interpreter("numbers") == []


def numbers():
    """The matrix rules of which one does."""
    warnings.simplefilter("ignore")
    launched, found = TritonArrays._matrices, []

    def sent(self, bundle, numbers, move=True):
        there = {"_t": torch.tensor(float(bundle.t), dtype=torch.float64)}
        for name, value in numbers.items():
            counts = name in bundle.spec.counters() or isinstance(value, (bool, np.bool_)) or value is None
            there[name] = value if counts else torch.tensor(value, dtype=torch.float64)
        return launched(self, bundle, there, move)

    for case in ONCE:
        if case[0] in MATRIX:
            ends = []
            for TritonArrays._matrices in (launched, sent):
                tensors, opt, gradients, _ = two_groups(case, False)
                for grads in gradients:
                    give(tensors, grads)
                    opt.step()
                ends.append([p.detach() for p in tensors.values()])
            found += [] if all(map(torch.equal, *ends)) else [case[0]]
    TritonArrays._matrices = launched
    return found


def test_larger_bases_go_first():
    assert [urgency(n) for n in (1, 128, 512, 768, 2048, 2304, 3072, 50_000)] == [0, 0, 0, -1, -2, -2, -3, -3]


def test_decisions_on_the_device_in_the_interpreter():
    assert in_the_interpreter("decisions") == []


def decisions():
    """What is wrong with skipping, scaling and hyperparameters on the device; nothing, it is hoped."""
    warnings.simplefilter("ignore")
    wrong = []
    tensors, opt, gradients, _ = two_groups(("nadamw", {}), True, nonfinite="skip")
    give(tensors, gradients[0])
    opt.step()
    before = [t.clone() for p in tensors.values() for t in (p.detach(), *opt.state[p].values())]
    tensors["b"].grad[3] = float("nan")
    opt.step()
    after = [t for p in tensors.values() for t in (p.detach(), *opt.state[p].values())]
    wrong += [] if all(map(torch.equal, before, after)) and opt.skipped == 1 else ["a step that is skipped moved something"]
    opt.found_inf, opt.grad_scale = torch.tensor([1.0]), torch.tensor([4.0])
    give(tensors, gradients[1])
    opt.step()
    wrong += [] if all(map(torch.equal, before, after)) and opt.skipped == 1 else ["found_inf did not stop the step"]
    plain, other, _, _ = two_groups(("nadamw", {}), True)
    give(plain, gradients[0])
    other.step()
    give(plain, gradients[1])
    other.step()
    opt.found_inf = torch.tensor([0.0])
    for p in tensors.values():
        p.grad = p.grad * 4
    opt.step()
    wrong += [] if all(torch.allclose(tensors[k], plain[k], atol=1e-7) for k in plain) else ["grad_scale is not undone"]
    p, lr = torch.nn.Parameter(torch.ones(5)), torch.tensor(0.1)
    p.grad = torch.ones(5)
    live = front.AdamW([p], lr=lr, weight_decay=0.0, engine="triton", capturable=True)
    live.step()
    there = p.detach().clone()
    lr.fill_(0.0)
    live.step()
    wrong += [] if torch.equal(p, there) else ["a learning rate on the device was read once"]
    p = torch.nn.Parameter(torch.ones(5))
    guarded = front.AdamW([("p", p)], engine="triton", capturable=True, skip_above=6.0)
    for t in range(70):
        p.grad = torch.full((5,), 1 + 0.1 * (t % 3))
        guarded.step()
    before = [t.clone() for t in (p.detach(), *guarded.state[p].values())]
    p.grad = torch.full((5,), 5.0)
    guarded.step()
    still = all(map(torch.equal, before, (p.detach(), *guarded.state[p].values())))
    wrong += [] if still and guarded.skipped == 1 else ["skip_above did not leave out a step"]
    p.grad = torch.full((5,), 1.1)
    guarded.stats(next=True)
    guarded.step()
    norm = float(guarded.stats().each["p"]["grad_norm"])
    return wrong + (
        [] if guarded.skipped == 1 and abs(norm - 1.1 * 5**0.5) < 1e-5 else ["stats or skip_above after a step left out"]
    )


def test_products_in_the_interpreter():
    """Newton–Schulz in half precision, wide and tall, sides that fill blocks and sides that do not, both forms and kernels."""
    results = in_the_interpreter("orthogonalized")
    assert len(results) == 8
    assert {case: gap for case, gap in results.items() if not gap < (5e-3 if "plain" in case else 2e-2)} == {}


def orthogonalized():
    from rlx_optim import linalg
    from rlx_optim.engines.reference import Reference
    from rlx_optim.engines.triton_ import products

    products.CONFIGS[0]["LEAST"] = 128  # so that the kernel for large matrices is interpreted on a small one
    products.CONFIGS[0]["BN"] = 128
    found = {}
    for shape in ((2, 128, 256), (1, 256, 128), (1, 130, 140), (1, 140, 130)):
        U = 1e-5 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
        want = torch.tensor(linalg.newton_schulz(Reference(), U.double().numpy(), 5, COEFFICIENTS, 1e-7))
        norm = torch.linalg.vector_norm(U.flatten(1), dim=1, dtype=torch.float64)
        for form in products.FORMS:
            got = products.orthogonalize(U, norm, 5, COEFFICIENTS, 1e-7, form).double()
            found[f"{shape} {form}"] = float((got - want).norm() / want.norm())
    return found


# ---- without a GPU: the compiler -----------------------------------------------------------------------------------------
def test_everything_compiles_for_hopper():
    """What the interpreter tolerates the compiler may not: every kernel down to machine code for sm_90."""
    kernels = with_the_compiler("built")
    of_rules = {"sweep", "tiles", "strips", "fold", "fold_lines", "fill"}
    of_panels = {"gram", "factor", "combine", "follows", "shares", "less", "dots", "choose"}
    assert set(kernels) == of_rules | of_panels | {"symmetric", "symmetric_any", "shrink", "repack", "split", "renew"}
    assert all(sizes and min(sizes) > 0 for sizes in kernels.values())
    assert len(kernels["sweep"]) >= 14


def with_the_compiler(function, *args):
    """What a function of this file returns in a process where Triton compiles for Hopper, and launches nothing."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import json, test_triton; "
    code += f"test_triton.compile_for_hopper(); print(json.dumps(test_triton.{function}(*{args!r})))"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def compile_for_hopper():
    """The driver is a stand-in that knows its target alone, and tensors on the CPU are taken."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver:
        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

    warnings.simplefilter("ignore")
    driver.set_active(Driver())
    front.engines.os = types.SimpleNamespace(environ={"TRITON_INTERPRET": "1"})


def built():
    """Sizes of machine code by kernel."""
    from triton.runtime.jit import JITFunction

    run, seen = JITFunction.run, {}

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        seen.setdefault(self.__name__, {})[kernel.hash] = len(kernel.asm["cubin"])

    JITFunction.run = compile_only
    for name in rlx_optim.list_optimizers():
        settings = AS_NAMED.get(name, {})
        params = [torch.nn.Parameter(torch.ones(*shape)) for shape in ((64, 64), (20, 36), (24,))]
        for p in params:
            p.grad = torch.ones_like(p)
        getattr(front, spec_class(name).__name__)(params, engine="triton", **settings).step()
    for wanted in ("int8", "bfloat16"):
        p = torch.nn.Parameter(torch.ones(64, 65))
        p.grad = torch.ones_like(p)
        front.AdamW([p], engine="triton", state_dtype=wanted).step()
        for how in ("stochastic", "exact"):
            half = torch.nn.Parameter(p.detach().bfloat16())
            half.grad = torch.ones_like(half)
            (front.AdamW if wanted == "int8" else front.Adafactor)([half], engine="triton", rounding=how).step()
    from rlx_optim.engines.triton_ import panels, precise, products

    for side in (1024, 136):
        U = torch.ones(1, side, side)
        products.orthogonalize(U, torch.ones(1), 1, COEFFICIENTS, 1e-7)
    for U in (torch.ones(1, 256, 300), torch.ones(1, 300, 256).mT):
        precise.product(U, U.mT)
        precise.product(U, U.mT, bound=1)
        precise.square(U)
    for n, dtype in ((64, torch.float32), (20, torch.float64)):
        noise = torch.ones(1, n, dtype=dtype)
        panels.orthonormal(torch.ones(1, 300, n, dtype=dtype), noise)
        panels.follow(noise, torch.ones(1, 40, n, dtype=dtype), torch.ones(1, 40, dtype=dtype))
    first, rest = torch.ones(1, 300, 64), torch.ones(1, 300, 20)
    panels.without(rest, first, torch.ones(1, 20), torch.ones(1, 64))
    panels.without(rest, first, None, None)
    panels.diagonal(first, first)
    panels.chosen(first, first, torch.zeros(1, 64, dtype=torch.bool), torch.zeros(1, 64, dtype=torch.int64))
    return {name: list(sizes.values()) for name, sizes in seen.items()}


def test_no_kernel_is_compiled_for_a_size():
    """Other shapes ask for no kernels that the first did not: what differs is whether sizes are multiples of 16."""
    first, others = with_the_compiler("asked_for")
    assert set(first) >= {"sweep", "symmetric", "symmetric_any", "split", "renew", "gram", "shares", "less", "dots", "fill"}
    assert {name: more for name, more in others.items() if more} == {}
    assert max(first.values()) <= 16


def asked_for():
    """How many variants of each kernel some shapes are stepped by, and how many more others of the same kind."""
    from triton.runtime.jit import JITFunction

    from rlx_optim.engines.triton_ import noise, panels, precise, products

    seen = {}

    def noted(self, key, *others):
        seen.setdefault(self.__name__, set()).add(str(key))

    JITFunction._do_compile = noted

    def step(sides, others, batch, rows):
        """Matrices of these sides and those, wide and tall, mixed and stacked by shape."""
        shapes = [shape for a in sides for b in others for shape in ((a, b), (b, a))]
        for name in ("Muon", "NorMuon", "Scion", "KronPSGD"):
            kron = name == "KronPSGD"
            params = [torch.nn.Parameter(torch.ones(*shape)) for shape in (shapes[:2] if kron else shapes)]
            for p in params:
                p.grad = torch.ones_like(p)
            getattr(front, name)(params, engine="triton", **({} if kron else {"ns_steps": 2})).step()
        for n in (1024 * batch, 1280):
            X, A = torch.ones(batch, n, 64 * rows, dtype=torch.half), torch.ones(batch, n, n, dtype=torch.half)
            products.product(X, X, A)
            products.product(X.mT.contiguous(), X.mT.contiguous(), A, tall=True)
            products.product(A, A, torch.empty_like(A), add=A)
        for a in sides:
            for b in others:
                U = torch.ones(batch, a + 256, b + 256)
                for X in (U, U.mT):
                    precise.product(X, X.mT)
                    precise.product(X, X.mT, bound=1)
                precise.square(torch.ones(batch, 256 * batch, a))
                precise.square(torch.ones(batch, a, 256 * batch).mT)
                for Q in (torch.ones(batch, a, b), torch.ones(batch, 8 * a + rows, b)):
                    noise_of = torch.ones(batch, b)
                    panels.orthonormal(Q[..., :64], noise_of[..., :64])
                    panels.follow(noise_of, Q, torch.ones(batch, Q.shape[1]))
                    for following in ((noise_of[..., 64:], noise_of[..., :64]), (None, None)):
                        panels.without(Q[..., 64:], Q[..., :64], *following)
                    panels.diagonal(Q, Q)
                    panels.chosen(Q, Q, torch.zeros(batch, b, dtype=torch.bool), torch.zeros(batch, b, dtype=torch.int64))
                noise.draw("normal", torch.ones(batch, 4), batch, (batch, a, b))
                noise.draw("uniform", torch.ones(batch, 4), 16 * batch, (batch, a))

    step((100, 137, 176), (250, 304), batch=1, rows=1)
    first = {name: len(keys) for name, keys in seen.items()}
    step((90, 155, 208), (270, 320), batch=3, rows=5)
    return first, {name: len(keys) - first.get(name, 0) for name, keys in seen.items()}


@pytest.mark.parametrize("kind", ["of many shapes", "wide and tall", "large", "bases"])
def test_what_is_compiled_ahead_is_what_is_launched(kind):
    compiled, more = with_the_compiler("compiled_ahead", kind)
    assert (
        compiled
        == {
            "of many shapes": {"repack": 2, "shrink": 1, "symmetric_any": 2},
            "wide and tall": {"shrink": 1, "symmetric_any": 3},
            "large": {"shrink": 1, "symmetric": 2},
            "bases": {
                "gram": 1,
                "factor": 1,
                "combine": 1,
                "shares": 2,
                "less": 4,
                "follows": 1,
                "dots": 1,
                "choose": 1,
                "split": 5,
            },
        }[kind]
    )
    assert more == dict.fromkeys(compiled, 0)


def compiled_ahead(kind):
    """How many variants of each kernel other threads compile, and how many steps then lack."""
    from triton.runtime.jit import JITFunction

    from rlx_optim.engines.torch_ import TorchEngine
    from rlx_optim.engines.triton_ import ahead

    TorchEngine.to_float64 = lambda self, X: X  # as on CUDA
    seen = {}
    JITFunction._do_compile = lambda self, key, *others: seen.setdefault(self.__name__, set()).add(str(key))
    ahead.start = lambda device, *functions: [function() for function in functions][:0]
    device = torch.device("cpu")
    for prepare in {
        "of many shapes": (ahead.packing, ahead.shrinking, ahead.multiplying),
        "wide and tall": (ahead.shrinking, lambda device: ahead.multiplying(device, tall=True)),
        "large": (ahead.shrinking, lambda device: ahead.multiplying(device, large=True)),
        "bases": (ahead.bases,),
    }[kind]:
        prepare(device)
    before = {name: len(keys) for name, keys in seen.items()}
    shapes = {
        "of many shapes": ((130, 200), (300, 129), (40, 70)),
        "wide and tall": ((640, 768), (768, 640)),
        "large": ((1024, 1280),),
        "bases": ((512, 768),),
    }[kind]
    params = [torch.nn.Parameter(torch.ones(*shape)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    if kind == "bases":
        opt = front.SOAP(params, engine="triton", precondition_frequency=1)
        opt.step()
        before.pop("renew")  # the running average has one of its own
    else:
        opt = front.Muon(params, engine="triton", ns_steps=2)
    opt.step()
    return before, {name: len(seen[name]) - n for name, n in before.items()}


def test_a_step_on_a_device_imports_nothing_of_the_cpu_engine():
    code = """
import sys, torch, rlx_optim.torch as front
params = [torch.nn.Parameter(torch.ones(5, n)) for n in (4, 6)]
for p in params:
    p.grad = torch.ones_like(p)
opt = front.AdamW(params, engine="triton")
for _ in range(2):
    opt.step()
    print({"llvmlite"} & set(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["set()", "set()"], done.stderr[-2000:]


def test_stacks_of_matrices_run_on_as_many_tracks_as_there_are(monkeypatch):
    from rlx_optim.engines.triton_ import matrices, replay

    monkeypatch.setattr(replay, "Track", lambda device: object())
    engine, watch = types.SimpleNamespace(device=None), types.SimpleNamespace(tracks=[])
    given = [matrices.TritonArrays._track(engine, watch) for _ in range(2 * replay.TRACKS)]
    assert len(set(given[: replay.TRACKS])) == replay.TRACKS == len(watch.tracks)
    assert given[replay.TRACKS :] == given[: replay.TRACKS]


def test_without_a_gpu_it_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="engine 'triton' cannot step a parameter on cpu"):
        front.AdamW([torch.nn.Parameter(torch.ones(3))], engine="triton")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: front.SOAP([p], capturable=True), "capturable=True needs the triton engine"),
        (lambda p: front.AdamW([p], capturable=1), "capturable must be True or False"),
    ],
)
def test_what_cannot_be_captured_is_refused(make, message):
    p = torch.nn.Parameter(torch.ones(3, 3))
    p.grad = torch.ones(3, 3)
    with pytest.raises((ValueError, TypeError), match=message):
        make(p).step()
    assert torch.equal(p, torch.ones(3, 3))


# ---- on a GPU --------------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("case", EVERY, ids=lambda case: "-".join([case[0], *(f"{k}={v}" for k, v in case[1].items())]))
def test_every_rule_on_the_gpu(case):
    assert walk(case, "cuda", steps=20) < (1e-3 if case[0] in MATRIX else 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CAPTURABLE, ids=lambda case: "-".join([case[0], *(f"{k}={v}" for k, v in case[1].items())]))
def test_a_captured_step_is_the_eager_one_bit_for_bit(case):
    ends = []
    for captured in (False, True):
        tensors, opt, gradients, _ = two_groups(case, True, "cuda", steps=6)
        for p in tensors.values():
            p.grad = torch.zeros_like(p)
        graph = None
        for i, grads in enumerate(gradients):
            for k, p in tensors.items():
                p.grad.copy_(torch.tensor(grads[k]))
            if captured and i == 2:
                torch.cuda.synchronize()
                gc.collect()  # what is freed on a device may end a recording
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    opt.step()
            opt.step() if graph is None else graph.replay()
        torch.cuda.synchronize()
        assert all(float(opt.state[p]["step"]) == len(gradients) for p in tensors.values())
        ends.append([t.clone() for p in tensors.values() for t in (p.detach(), *opt.state[p].values())])
    assert all(map(torch.equal, *ends))


@pytest.mark.gpu
def test_capture_without_the_flag_is_refused():
    p = torch.nn.Parameter(torch.ones(5, device="cuda"))
    p.grad = torch.ones_like(p)
    opt = front.AdamW([p])
    opt.step()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="capturable=True"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        opt.step()


@pytest.mark.gpu
def test_half_precision_products_are_closer_than_bfloat16():
    """On Gaussian and on low-rank-dominated matrices at most half of the error of the usual bfloat16 iteration."""
    from rlx_optim.engines.triton_ import products

    def iterate(X):
        a, b, c = COEFFICIENTS
        X = X / X.flatten(1).norm(dim=1)[:, None, None]
        for _ in range(5):
            A = X @ X.mT
            X = a * X + (b * A + c * A @ A) @ X
        return X

    torch.manual_seed(0)
    for shape in ((2, 512, 2048), (2, 1024, 1024), (1, 520, 1000)):
        gauss = torch.randn(shape, device="cuda")
        few = torch.randn(*shape[:2], 32, device="cuda") @ torch.randn(shape[0], 32, shape[2], device="cuda")
        for U in (1e-4 * gauss, few + 0.03 * gauss):
            want, norm = iterate(U.double()), U.flatten(1).norm(dim=1).double()
            gap, usual = (
                float((X.double() - want).norm() / want.norm())
                for X in (products.orthogonalize(U, norm, 5, COEFFICIENTS, 1e-7), iterate(U.bfloat16()))
            )
            assert gap <= usual / 2
            tall = products.orthogonalize(U.mT.contiguous(), norm, 5, COEFFICIENTS, 1e-7)
            assert float((tall.mT.double() - want).norm() / want.norm()) <= usual / 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Muon", "NorMuon", "Scion", "SOAP", "KronPSGD"])
def test_many_shapes_are_stepped_by_few_kernels(name, monkeypatch):
    from triton.runtime.jit import JITFunction

    compiled, compiles = [], JITFunction._do_compile

    def counted(self, *args):
        compiled.append(self.__name__)
        return compiles(self, *args)

    monkeypatch.setattr(JITFunction, "_do_compile", counted)
    rng = np.random.default_rng(0)
    shapes = list(dict.fromkeys(map(tuple, rng.integers(32, 512, (60, 2), endpoint=True).tolist())))
    params = [torch.nn.Parameter(torch.randn(*shape, device="cuda")) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    opt = getattr(front, name)(params, **({"precondition_frequency": 2} if name == "SOAP" else {}))
    for _ in range(5):
        opt.step()
    assert len(compiled) <= 32, compiled
    assert all(bool(p.isfinite().all()) for p in params)


@pytest.mark.gpu
def test_gradients_may_move_and_groups_may_differ():
    """The short way and the long way give the same bits, with gradients that are new at every step."""
    ends = []
    for long in (False, True):
        tensors, opt, gradients, _ = two_groups(("adamw", {}), False, "cuda", steps=6)
        for grads in gradients:
            give(tensors, grads)
            if long:
                opt._again = None
            opt.step()
        ends.append([p.detach().clone() for p in tensors.values()])
    assert all(map(torch.equal, *ends))


@pytest.mark.gpu
def test_cpu_and_cuda_parameters_in_one_optimizer():
    here, there = torch.nn.Parameter(torch.ones(50)), torch.nn.Parameter(torch.ones(50, device="cuda"))
    opt = front.AdamW([here, there], lr=0.1)
    for _ in range(3):
        here.grad, there.grad = torch.full((50,), 0.3), torch.full((50,), 0.3, device="cuda")
        opt.step()
    assert torch.allclose(here, there.cpu(), atol=1e-7)
    there.data = there.data.cpu()
    there.grad = None
    there.grad = torch.ones(50)
    before = here.detach().clone()
    with pytest.raises(RuntimeError, match="has moved to cpu, its state is on cuda:0"):
        opt.step()
    assert torch.equal(here, before)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    n = 2**31 + 1000
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB")
    p = torch.nn.Parameter(torch.ones(n, device="cuda", dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    opt = front.AdamW([p], lr=0.5, weight_decay=0.0)
    opt.step()
    for part in (p.detach()[:1000], p.detach()[2**31 - 500 : 2**31 + 500], p.detach()[-1000:]):
        assert torch.equal(part, torch.full((1000,), 0.5, device="cuda", dtype=torch.bfloat16))
    assert float(opt.state[p]["exp_avg"][-1]) == pytest.approx(0.1)


@pytest.mark.gpu
def test_automatic_choice_on_the_gpu():
    p = torch.nn.Parameter(torch.ones(5, device="cuda"))
    (text,) = front.AdamW([p]).engine_report().values()
    assert text.startswith("triton: cuda:0")
    assert text.endswith("(CUDA tensors, Triton installed)")


@pytest.mark.gpu
def test_views_at_odd_addresses_on_the_gpu():
    """Views that do not start on 16 bytes are right, too."""
    room, grads = torch.ones(5000, device="cuda"), torch.full((5000,), 0.5, device="cuda")
    odd, even = room[1:4001].detach().requires_grad_(), torch.ones(4000, device="cuda").requires_grad_()
    for p, g in ((odd, grads[3:4003]), (even, torch.full((4000,), 0.5, device="cuda"))):
        p.grad = g
        front.AdamW([p], lr=0.1).step()
    assert torch.equal(odd, even)
    assert room[0] == 1
    assert (room[4001:] == 1).all()


def test_tables_of_addresses_are_sent_when_something_moved():
    """Tensors of two types are two groups; what is aligned is said of each; a table may live in another's memory."""
    tables = pytest.importorskip("rlx_optim.engines.triton_.tables")

    class Sender(tables.Sender):
        sent = 0

        def send(self, host, to=None):
            self.sent += 1
            return super().send(host, to)

    kinds = (torch.float32, torch.bfloat16, torch.float32)
    p, g = (tables.Pointers(np.array(each, np.int64), kinds) for each in ([160, 320, 480], [1600, 3202, 4800]))
    table, sender = tables.Table([p, g], 3), Sender(torch.device("cpu"))

    def told():
        return [(addresses.tolist(), aligned) for addresses, aligned in table.addresses([p, g], sender)]

    first = [([[160, 480], [1600, 4800]], True), ([[320], [3202]], False)]
    assert told() == told() == first
    g.address = g.address.copy()
    assert told() == first
    assert sender.sent == 1  # nothing had moved
    g.address = np.array([1604, 3200, 4800], np.int64)
    second = [([[160, 480], [1604, 4800]], False), ([[320], [3200]], True)]
    assert told() == second
    assert sender.sent == 2
    words, room = np.zeros(8, np.int64), torch.zeros(8, dtype=torch.int64)
    table.fill([p, g], words[2:], room[2:])
    room.copy_(torch.from_numpy(words))
    assert words.tolist() == [0, 0, 160, 480, 1604, 4800, 320, 3200]
    assert told() == second
    assert sender.sent == 2
    g.address = np.array([1600, 3202, 4800], np.int64)
    assert told() == first
    assert room.tolist() == [0, 0, 160, 480, 1600, 4800, 320, 3202]

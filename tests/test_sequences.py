"""Random sequences of what programs do to parameters, gradients, groups, state, modes and files: ours against torch.optim, and the
cpu engine against the torch engine for rules that torch lacks.

Every operation is done to both sides. Whenever memory is given up, foreign tensors of that size are made at once and must keep what
they hold: a write to where a parameter or its state once was shows there, if it does not show in the numbers.
"""

import copy
import functools
import io
import pickle
import random
import warnings

import pytest

torch = pytest.importorskip("torch")

import rlx_optim.torch as ours  # noqa: E402

PAIRS = {
    "sgd": (
        lambda p, **k: ours.SGD(p, lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.01, **k),
        lambda p, **k: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.01, **k),
    ),
    "plain": (lambda p, **k: ours.SGD(p, lr=0.05, **k), lambda p, **k: torch.optim.SGD(p, lr=0.05, **k)),
    "adam": (
        lambda p, **k: ours.Adam(p, lr=0.02, weight_decay=0.01, amsgrad=True, **k),
        lambda p, **k: torch.optim.Adam(p, lr=0.02, weight_decay=0.01, amsgrad=True, **k),
    ),
    "adamw": (
        lambda p, **k: ours.AdamW(p, lr=0.02, weight_decay=0.5, **k),
        lambda p, **k: torch.optim.AdamW(p, lr=0.02, weight_decay=0.5, **k),
    ),
    "nadamw": (
        lambda p, **k: ours.NAdamW(p, lr=0.02, weight_decay=0.1, convention="torch", **k),
        lambda p, **k: torch.optim.NAdam(p, lr=0.02, weight_decay=0.1, decoupled_weight_decay=True, **k),
    ),
    "radam": (
        lambda p, **k: ours.RAdam(p, lr=0.02, convention="torch", **k),
        lambda p, **k: torch.optim.RAdam(p, lr=0.02, **k),
    ),
    "adafactor": (
        lambda p, **k: ours.Adafactor(p, lr=0.02, eps=(1e-9, 1e-3), **k),
        lambda p, **k: torch.optim.Adafactor(p, lr=0.02, eps=(1e-9, 1e-3), **k),
    ),
}
for _name, _settings in {
    "QHAdamW": {},
    "StableAdamW": dict(lr=0.02),
    "AdEMAMix": dict(lr=0.02, beta3_warmup=20),
    "Adan": dict(lr=0.02),
    "ADOPT": dict(lr=0.02),
    "LaProp": dict(lr=0.02),
    "LARS": dict(lr=5.0, weight_decay=0.01),
    "Lion": dict(lr=1e-2, weight_decay=0.1),
    "Lamb": dict(lr=0.02),
    "MARS": dict(lr=0.02),
    "Sophia": dict(lr=0.02),
    "Muon": dict(weight_decay=0.1),
    "KronPSGD": dict(lr=0.01),
    "SOAP": dict(lr=0.01, eps=1e-2, precondition_frequency=2),  # a gradient that stands is 0 off the diagonal, but for rounding
}.items():
    PAIRS[_name] = tuple(
        functools.partial(getattr(ours, _name), **{"engine": engine, **_settings}) for engine in ("cpu", "torch")
    )
TORCHS = ("sgd", "plain", "adam", "adamw", "nadamw", "radam", "adafactor")
TOLERANCE = {torch.float64: 1e-7, torch.float32: 3e-5}  # a float32 factor or beta may be among the numbers
LOOSE = {"SOAP": 20.0, "KronPSGD": 50.0, "Muon": 50.0, "Lamb": 5.0, "LARS": 5.0, "StableAdamW": 5.0, "MARS": 5.0}
SHAPES = [(3, 5), (4, 4), (7,), (), (2, 3, 4), (0,), (1,)]


class Twins:
    """The same program on two sides."""

    def __init__(self, seed, device="cpu", engine=None):
        """engine: of our side, where it is not the pair's own."""
        self.rng = random.Random(seed)
        self.kind = self.rng.choice(list(PAIRS))
        self.log = [f"seed {seed}: {self.kind}"]
        self.foreign = []  # (tensor, what it must hold)
        self.steps = self.operations = self.replaced = 0
        rng = self.rng
        dtypes = rng.choice([[torch.float64], [torch.float32], [torch.float32, torch.float64]])
        torch.manual_seed(seed)
        shapes = [shape for shape in SHAPES if self.kind != "adafactor" or 0 not in shape]  # torch's divides by their size
        start = [torch.randn(rng.choice(shapes), dtype=rng.choice(dtypes)).to(device) for _ in range(rng.randint(1, 5))]
        self.params = [[torch.nn.Parameter(t.clone()) for t in start] for _ in range(2)]
        self.extra = [torch.randn(rng.choice(SHAPES[:4]), dtype=rng.choice(dtypes)).to(device) for _ in range(2)]
        maximize = self.kind not in ("Sophia",) and rng.random() < 0.3
        self.opts = []
        for make, params in zip(PAIRS[self.kind], self.params, strict=True):
            groups = [{"params": params[:1], "maximize": maximize}, {"params": params[1:]}] if len(params) > 1 else params
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                given = {"foreach": False} if self.opts and self.kind in TORCHS else {}  # else torch races where memory is shared
                given |= {"engine": engine} if not self.opts and engine is not None else {}
                self.opts.append(make(groups, **given))

    # ---- helpers
    def pick(self):
        return self.rng.randrange(len(self.params[0]))

    def both(self, i):
        return [side[i] for side in self.params]

    def gave_up(self, *shapes_and_types):
        """Memory was freed: whoever gets it now must not be written to."""
        self.replaced += 1
        for like in shapes_and_types:
            for _ in range(3):
                t = torch.full_like(like, 7.25, memory_format=torch.contiguous_format)
                self.foreign.append((t, t.clone()))
        del self.foreign[:-60]

    def states(self, i):
        """(ours, theirs) tensors of state that both sides have, beside the step."""
        mine, theirs = (opt.state.get(p, {}) for opt, p in zip(self.opts, self.both(i), strict=True))
        names = [
            k for k in theirs if torch.is_tensor(theirs[k]) and torch.is_tensor(mine.get(k)) and k not in ("step", "mu_product")
        ]
        names = [k for k in names if mine[k].shape == theirs[k].shape]
        return [(mine, theirs, k) for k in names]

    # ---- operations: gradients
    def grad(self, i=None, how=None):
        i = self.pick() if i is None else i
        how = how or self.rng.choice(["new", "new", "new", "none", "inplace", "flat", "strided", "negative", "standing"])
        value = torch.randn(self.params[0][i].shape, dtype=self.params[0][i].dtype).to(self.params[0][i].device)
        for p in self.both(i):
            if how == "none":
                p.grad = None
            elif how == "standing" and p.grad is not None:
                pass
            elif how == "inplace" and p.grad is not None:
                p.grad.detach().copy_(value)
            elif how == "flat":
                buffer = torch.zeros(value.numel() + 9, dtype=value.dtype, device=value.device)
                p.grad = buffer[3 : 3 + value.numel()].view(value.shape).copy_(value)
            elif how == "strided" and value.ndim > 1:
                p.grad = value.transpose(0, 1).contiguous().transpose(0, 1)
            elif how == "negative":
                p.grad = torch._neg_view(-value)
            else:
                p.grad = value.clone()
        return f"grad {i} {how}"

    def grads(self):
        return ", ".join(self.grad(i, self.rng.choice(["new", "flat", None])) for i in range(len(self.params[0])))

    def no_grads(self):
        how = self.rng.choice(["opt", "assign", "zero"])
        for opt, params in zip(self.opts, self.params, strict=True):
            if how == "assign":
                for p in params:
                    p.grad = None
            else:
                opt.zero_grad(set_to_none=how == "opt")
        return f"zero_grad {how}"

    def clip(self):
        norm = self.rng.choice([0.01, 1.0, 1e6])
        ours.clip_grad_norm_(self.opts[0], norm)
        torch.nn.utils.clip_grad_norm_(self.params[1], norm, foreach=False)
        return f"clip {norm}"

    # ---- operations: parameters
    def replace(self):
        i, how = (
            self.pick(),
            self.rng.choice(["clone", "clamp", "set_", "swap", "share", "t", "strided", "grow", "view", "empty_cache"]),
        )
        for p in self.both(i):
            old = p.detach().clone()
            if how == "clone":
                p.data = p.data.clone()
            elif how == "clamp":
                p.data = p.data.clamp(min=-1.0)
            elif how == "set_":
                with torch.no_grad():
                    p.set_(p.detach().clone())
            elif how == "swap" and p.grad is None:
                torch.utils.swap_tensors(p, torch.nn.Parameter(p.detach().clone()))
            elif how == "share" and p.numel():
                p.data.share_memory_()
            elif how == "t" and tuple(p.shape) == (4, 4):
                p.data = p.data.t()
            elif how == "strided" and p.ndim > 1:
                p.data = p.data.transpose(0, 1).contiguous().transpose(0, 1)
            elif how == "view":
                p.data = torch.cat([p.data.reshape(-1), torch.zeros(5, dtype=p.dtype, device=p.device)])[: p.numel()].view(
                    p.shape
                )
            elif how == "grow" and p.numel() and not p.is_shared():
                p.data.untyped_storage().resize_(p.untyped_storage().nbytes() * 2)
            self.gave_up(old)
        return f"parameter {i} {how}"

    def tie(self):
        i, j = self.pick(), self.pick()
        if i == j or self.params[0][i].shape != self.params[0][j].shape or self.params[0][i].dtype != self.params[0][j].dtype:
            return "tie none"
        for side in self.params:
            side[i].data = side[j].data
        return f"tie {i} {j}"

    def write(self):
        i = self.pick()
        for p in self.both(i):
            with torch.no_grad():
                p.mul_(0.9)
        return f"write {i}"

    # ---- operations: state
    def state(self):
        i, how = self.pick(), self.rng.choice(["data", "set_", "swap", "share", "scale", "object", "zero.data", "strided"])
        for mine, theirs, k in self.states(i):
            for held in (mine, theirs):
                t = held[k]
                old = t.clone()
                if how == "data":
                    t.data = t.data.clone()
                elif how == "zero.data":
                    t.data = torch.zeros_like(t.data)
                elif how == "set_":
                    t.set_(t.clone())
                elif how == "swap":
                    try:
                        torch.utils.swap_tensors(t, t.clone())
                    except RuntimeError:  # torch's: somebody has a view of it
                        t.data = t.data.clone()
                elif how == "share" and t.numel():
                    t.share_memory_()
                elif how == "scale":
                    t.mul_(0.5)
                elif how == "object":
                    held[k] = t.clone()
                self.gave_up(old)
        if how == "share":
            for opt, p in zip(self.opts, self.both(i), strict=True):
                step = opt.state.get(p, {}).get("step")
                if torch.is_tensor(step):
                    step.share_memory_()
        return f"state {i} {how}"

    def clear(self):
        if self.kind not in TORCHS or self.rng.random() < 0.7:
            return "clear not"
        for opt in self.opts:
            opt.state.clear()
        return "clear state"

    def round_trip(self):
        # torch's Adafactor does not find its "capturable" again in a copy on CUDA (2.11)
        alone = self.kind == "adafactor" and self.params[0][0].device.type != "cpu"
        how = self.rng.choice(["dict", "file"] if alone else ["dict", "file", "deepcopy", "pickle"])
        for k, (opt, params) in enumerate(zip(self.opts, self.params, strict=True)):
            if how in ("dict", "file"):
                saved = opt.state_dict()
                if how == "file":
                    file = io.BytesIO()
                    torch.save(saved, file)
                    file.seek(0)
                    saved = torch.load(file, weights_only=True)
                opt.load_state_dict(saved)
            elif how == "deepcopy":
                grads = [p.grad for p in params]
                copied = copy.deepcopy((opt, params))
                self.opts[k], self.params[k] = copied
                for p, g in zip(self.params[k], grads, strict=True):
                    p.grad = None if g is None else g.clone()
            else:
                grads = [p.grad for p in params]
                for p in params:
                    p.grad = None
                self.opts[k], self.params[k] = pickle.loads(pickle.dumps((opt, params)))
                for p, g in zip(self.params[k], grads, strict=True):
                    p.grad = g
        return f"round trip {how}"

    # ---- operations: groups
    def group(self):
        what = self.rng.choice(["lr", "lr", "weight_decay", "betas", "tensor betas", "maximize"])
        index, x = self.rng.randrange(len(self.opts[0].param_groups)), self.rng.uniform(0.5, 1.5)
        for opt in self.opts:
            group = opt.param_groups[index]
            if what in ("lr", "weight_decay") and what in group:
                group[what] = float(group[what]) * x
            elif what == "betas" and "betas" in group:
                group["betas"] = (0.5 * x, 0.6 * x, 0.55 * x)[: len(group["betas"])]
            elif what == "tensor betas" and self.kind in ("adam", "adamw") and self.params[0][0].device.type == "cpu":
                if torch.is_tensor(group["betas"][0]):
                    group["betas"][0].mul_(0.9)
                elif self.kind == "adamw":
                    group["betas"] = (torch.tensor(0.6), 0.9)
            elif what == "maximize" and self.kind not in ("Sophia",):
                group["maximize"] = not group["maximize"]
        return f"group {index} {what}"

    def add(self):
        if not self.extra:
            return "add none"
        start = self.extra.pop()
        for opt, params in zip(self.opts, self.params, strict=True):
            params.append(torch.nn.Parameter(start.clone()))
            opt.add_param_group({"params": [params[-1]]})
        return f"add {tuple(start.shape)}"

    # ---- the step
    def step(self):
        mode = self.rng.choice([torch.no_grad, torch.enable_grad, torch.enable_grad, torch.enable_grad, torch.inference_mode])
        for opt in self.opts:
            # torch.optim cannot go on from a first step in inference mode: its state is made of inference tensors
            with mode() if opt is self.opts[0] else torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                opt.step()
        self.steps += 1
        self.compare()
        return f"step {mode.__name__}"

    def compare(self):
        for i, (a, b) in enumerate(zip(*self.params, strict=True)):
            scale = LOOSE.get(self.kind, 1.0) * max(1.0, float(b.detach().abs().max()) if b.numel() else 1.0)
            assert torch.allclose(a, b, rtol=0.0, atol=TOLERANCE[b.dtype] * scale, equal_nan=True), (
                f"parameter {i}: {(a - b).abs().max()} apart"
            )
        for t, value in self.foreign:
            assert torch.equal(t, value), "a tensor that is not ours was written to"

    WEIGHTS = (
        (grads, 5), (grad, 3), (no_grads, 2), (clip, 1), (replace, 4), (tie, 1), (write, 1), (state, 4), (clear, 1), (round_trip, 1),
        (group, 2), (add, 1), (step, 10),
    )  # fmt: skip

    def run(self, length):
        names, weights = zip(*self.WEIGHTS, strict=True)
        try:
            self.log.append(self.grads())
            for _ in range(length):
                operation = self.rng.choices(names, weights)[0]
                self.log.append(f"{operation.__name__} …")
                self.log[-1] = operation(self)
                self.operations += 1
        except Exception as problem:
            raise AssertionError("\n".join([*self.log, repr(problem)])) from problem
        return self.steps, self.operations, self.replaced


def run_many(first, count, length=25, **where):
    totals = [0, 0, 0]
    for seed in range(first, first + count):
        totals = [a + b for a, b in zip(totals, Twins(seed, **where).run(length), strict=True)]
    steps, operations, replaced = totals
    print(f"{count} sequences from seed {first}: {operations} operations, {steps} steps, {replaced} replacements of memory")
    return totals


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_sequences(first, one_thread):
    steps, operations, replaced = run_many(first, 100)
    assert steps > 300
    assert replaced > 300
    assert operations == 2500


def test_sequences_without_torchs_guards(one_thread, monkeypatch):
    monkeypatch.setattr("rlx_optim.torch.memory.TensorGuards", None)
    assert run_many(1000, 40)[0] > 120


def interpreted():
    return run_many(2000, 8, 12, engine="triton")


def test_sequences_on_the_triton_engine():
    pytest.importorskip("triton")
    from interpreter import in_the_interpreter

    assert in_the_interpreter("interpreted", "test_sequences")[0] > 10


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(3000, 3400, 100))
def test_sequences_on_the_gpu(first):
    assert run_many(first, 100, device="cuda", engine="triton")[0] > 300


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_sequences(one_thread):
    run_many(10_000, 4000)

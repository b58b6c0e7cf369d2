"""State in 8 and 16 bits: the codes, what is coded, every engine, everywhere state goes, and what is refused."""

import copy
import json
import pickle

import numpy as np
import pytest

import rlx_optim
from rlx_optim import storage
from rlx_optim.registry import FILES
from rlx_optim.spec import Slot, Spec, like, real
from rlx_optim.storage import HALF, NUMPY, POSITIVE, SIGNED, Quantized, decode, encode

SHAPES = {"w": (40, 200), "e": (3, 12, 130), "b": (200,), "s": (8, 8)}
FORMATS = ("bfloat16", "int8")
NEEDED = {"sgd": {"lr": 0.1, "momentum": 0.9}, "scion": {"momentum": 0.1}}  # else there is no state, or no step


def made(name, **settings):
    return rlx_optim.create(name, **{**NEEDED.get(name, {}), **settings})


def start(seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def walk(opt, params, steps, first=0):
    for i in range(first, first + steps):
        opt.step_all(params, start(100 + i))
    return params


def through(kind, x, t=1):
    return decode(NUMPY, Quantized(kind, *encode(NUMPY, kind, x, t).values()))


def relative(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


# ---- the codes ------------------------------------------------------------------------------------------------------------
def test_every_codec_gives_its_components():
    x = start()["w"]
    for codec in storage.CODECS.values():
        found = encode(NUMPY, codec.name, abs(x) if codec.signed is False else x, 1)
        types = {end: str(NUMPY.types[dtype].__name__) if dtype else "float32" for end, dtype in codec.components.items()}
        assert {end: each.dtype.name for end, each in found.items()} == types
        slot = Slot(x.shape, meaning="second moment" if codec.signed is False else "first moment", storage=codec.name)
        assert {end: each.shape for end, each in found.items()} == {
            e: shape for e, (shape, _) in storage.components(slot).items()
        }
    for wanted in storage.FORMATS:  # one codec for values of each kind
        for meaning in ("first moment", "second moment"):
            assert storage.CODECS[storage.storage_of(Slot(x.shape, meaning=meaning), wanted)].format == wanted


def test_a_further_format_is_one_codec(monkeypatch):
    """For engines that are array libraries: the reference steps with it, and knows what it takes."""

    def to_linear(codec, E, x, t, first):
        scale = storage.block_max(E, x)
        code = E.xp.round(codec.top * x * storage.repeat_scales(E, 1 / E.floor(scale, storage.TINY), x.shape))
        return {"": E.cast(code, "int8"), "_scale": scale}

    def from_linear(codec, E, codes, scale):
        return storage.repeat_scales(E, scale, codes.shape) * E.cast(codes, "float32") / codec.top

    codec = storage.Codec("linear", "linear8", {"": "int8", "_scale": "float32"}, to_linear, from_linear, top=127.0)
    monkeypatch.setitem(storage.CODECS, codec.name, codec)
    monkeypatch.setitem(storage.COMPONENTS, codec.name, codec.components)
    monkeypatch.setattr(storage, "FORMATS", (*storage.FORMATS, codec.format))
    opt = made("lion", state_dtype="linear8", engine="reference")
    params, exact = walk(opt, start(), 5), walk(made("lion", engine="reference"), start(), 5)
    assert opt._records["w"].state["m"].storage == "linear"
    assert opt.state("w")["m"].dtype == np.int8
    assert opt.state_bytes() < sum(each.nbytes for each in params.values()) / 2
    assert relative(params["w"], exact["w"]) < 1e-3


def test_codes_by_hand():
    x = np.zeros((2, 130), np.float32)
    x[0, :3], x[0, 129], x[1, 0] = (4.0, -1.0, 0.25), -3.0, 1e-8
    found = encode(NUMPY, SIGNED, x, 1)
    assert found["_scale"].tolist() == [[4.0, 3.0], [np.float32(1e-8), 0.0]]
    assert found[""][0, :3].tolist() == [127, -64, 32]
    assert found[""][0, 129] == -127
    assert found[""].dtype == np.int8
    assert encode(NUMPY, POSITIVE, x * x, 1)[""].dtype == np.uint8
    back = through(SIGNED, x)
    assert back[0, 0] == 4.0
    assert back[0, 1] == pytest.approx(-4 * (64 / 127) ** 2)
    assert back[1, 0] == np.float32(1e-8)
    v = encode(NUMPY, POSITIVE, x * x, 1)
    assert v["_scale"][0].tolist() == [4.0, 3.0]
    assert v[""][0, 0] == 255
    assert v[""][0, 4] == 1
    assert not through(POSITIVE, np.zeros((1, 128), np.float32)).any()
    assert not through(SIGNED, np.zeros((1, 5), np.float32)).any()


def test_bfloat16_is_rounded_by_chance_and_right_on_average():
    x = np.full((1, 50_000), np.float32(1 + 0.3 * 2.0**-7))
    found = through(HALF, x, 5)
    assert set(found.ravel().tolist()) == {1.0, 1 + 2.0**-7}
    assert found.mean() == pytest.approx(x[0, 0], abs=2.0**-7 * 0.01)
    assert (through(HALF, x, 6) != found).any()
    assert (through(HALF, x, 5) == found).all()
    exact = np.float32([[1.5, -3.0, 0.0, np.inf, -np.inf]])
    assert (through(HALF, exact) == exact).all()
    assert np.isnan(through(HALF, np.float32([[np.nan]]))).all()


def test_chance_does_not_repeat_itself():
    draws = np.array([storage.hash_bits(NUMPY, t, 4096) for t in range(1, 257)], np.float64) / 65536
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(draws.mean() - 0.5) < 2e-3
    for a, b in ((draws[1:], draws[:-1]), (draws[:, 1:], draws[:, :-1]), (draws[4:], draws[:-4])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02


@pytest.mark.parametrize("size", [1e-2, 1e-8])
@pytest.mark.parametrize("spread", [0.0, 0.7])
def test_error_of_the_update(size, spread):
    """AdamW's m/√v from states whose coordinates differ in size; the mark is 0.021."""
    rng = np.random.default_rng(0)
    sizes = size * np.exp(spread * rng.standard_normal((64, 1024)))
    m, v = np.zeros(sizes.shape), np.zeros(sizes.shape)
    for _ in range(60):
        g = rng.standard_normal(sizes.shape) * sizes
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    eps, m, v = size * 1e-6, np.float32(m), np.float32(v)
    found = through(SIGNED, m) / (np.sqrt(through(POSITIVE, v)) + eps)
    assert relative(found, m / (np.sqrt(v) + eps)) < (0.009 if not spread else 0.017)


@pytest.mark.parametrize("kind", [POSITIVE, HALF])
def test_a_slow_average_follows(kind):
    """√v after the gradients became ten times smaller, with beta2 = 0.999: a scale rounded up to bfloat16 leaves it 4.4 times too
    large for good, and so does a bfloat16 rounded to nearest."""
    rng = np.random.default_rng(0)
    v, exact = np.zeros((8, 128), np.float32), np.zeros((8, 128))
    for t in range(1, 4001):
        g = rng.standard_normal(v.shape) * (1.0 if t <= 1000 else 0.1)
        v, exact = through(kind, np.float32(0.999 * v + 0.001 * g * g), t), 0.999 * exact + 0.001 * g * g
    ratio = np.sqrt(v) / np.sqrt(exact)
    assert abs(ratio.mean() - 1) < 0.25
    assert ratio.max() < 2


def test_a_block_that_is_not_finite_says_so_and_leaves_its_neighbours():
    for bad in (np.nan, np.inf):
        x = np.ones((2, 256), np.float32)
        x[0, 3] = bad
        for kind in (SIGNED, POSITIVE):
            with np.errstate(invalid="ignore"):
                back = through(kind, x)
            assert not np.isfinite(back[0, :128]).any()
            assert (back[0, 128:] == 1).all()
            assert (back[1] == 1).all()


# ---- what is coded --------------------------------------------------------------------------------------------------------
EXACT = {  # slots of a large matrix that stay as they are
    "ademamix": {"slow"}, "adafactor": {"row", "col"}, "soap": {"L1", "L2", "Q1", "Q2"}, "kronpsgd": {"q1", "q2", "key"},
    "prodigy": {"s", "start", "d", "d_max", "gained"}, "normuon": {"v"}, "schedulefreeadamw": {"lead"}, "schedulefreesgd": {"lead"},
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_what_is_coded(name):
    for wanted in FORMATS:
        spec = rlx_optim.registry.spec_class(name)(**{"lr": 0.1, **NEEDED.get(name, {}), "state_dtype": wanted})
        kept = spec.stored_slots((64, 128))
        assert {slot for slot, each in kept.items() if not each.storage} == EXACT.get(name, set())
        assert not any(
            each.storage for shape in ((64, 63), (8192,)) if not spec.takes(shape) for each in spec.stored_slots(shape).values()
        )
        for slot, each in kept.items():
            if each.storage:
                whole = HALF if wanted == "bfloat16" else POSITIVE if "second moment" in each.meaning else SIGNED
                assert each.storage == whole, slot
    assert spec.replace(state_dtype="float32").stored_slots((64, 128)) == spec.slots((64, 128))


def test_bytes_a_parameter():
    spec = rlx_optim.registry.spec_class("adamw")(state_dtype="int8")
    assert sum(map(storage.count_bytes, spec.stored_slots((1024, 4096)).values())) / 1024 / 4096 == 2.0625
    opt = rlx_optim.AdamW(lr=1e-3, state_dtype="int8")
    opt.step("w", np.ones((64, 128), np.float32), np.ones((64, 128), np.float32))
    assert opt.state_bytes() == 2 * 64 * 132


class Own(Spec):
    lr: float = real(1e-3)

    def slots(self, shape):
        return like(shape, "other", m="first moment") | {"q": Slot((4, 4), factor=True, meaning="factor")}

    def scalars(self, t, counters):
        return {"step": self.lr}

    def update(self, E, x):
        return x


def test_somebody_elses_rule_has_it_by_what_its_slots_mean():
    kept = Own(state_dtype="int8").stored_slots((64, 64))
    assert [each.storage for each in kept.values()] == ["", SIGNED, ""]


# ---- every engine ---------------------------------------------------------------------------------------------------------
RULES = ["adamw", "lion", "sgd", "mars", "lamb", "adan", "muon", "soap", "prodigy", "adafactor"]


@pytest.mark.parametrize("wanted", FORMATS)
@pytest.mark.parametrize("name", RULES)
def test_engines_agree_with_the_reference(name, wanted):
    begin = start()
    states, results = [], []
    for engine in ("reference", "cpu"):
        opt = made(name, engine=engine, state_dtype=wanted)
        results.append(walk(opt, start(), 4))
        states.append({each: opt.state(each) for each in SHAPES})
    for each, p in results[1].items():
        assert relative(p - begin[each], results[0][each] - begin[each]) < 2e-3, each
    for each, state in states[0].items():
        for slot, want in state.items():
            got = states[1][each][slot]
            assert got.dtype == want.dtype
            if want.dtype.kind in "iu":
                assert (got != want).mean() < 0.01, (each, slot)


def test_modifiers_and_precision_with_coded_state():
    for settings in ({"cautious": True}, {"decay": "hyperball"}, {"precision": "float64"}):
        found = [
            walk(rlx_optim.AdamW(lr=1e-2, state_dtype="int8", engine=e, **settings), start(), 3) for e in ("reference", "cpu")
        ]
        assert all(relative(found[1][each], found[0][each]) < 1e-5 for each in SHAPES)


def test_stats_of_coded_state():
    seen = []
    for engine in ("reference", "cpu"):
        opt = rlx_optim.AdamW(lr=1e-2, state_dtype="int8", engine=engine)
        opt.stats(next=True)
        walk(opt, start(), 1)
        seen.append(opt.stats())
    assert seen[0].all["update_norm"] == pytest.approx(seen[1].all["update_norm"], rel=1e-5)


def test_one_by_one_is_as_all_at_once():
    together, apart = walk(rlx_optim.AdamW(lr=1e-2, state_dtype="int8"), start(), 3), start()
    opt = rlx_optim.AdamW(lr=1e-2, state_dtype="int8")
    for i in range(3):
        for name, g in start(100 + i).items():
            opt.step(name, apart[name], g)
        opt.end_iteration()
    assert all(np.array_equal(apart[name], together[name]) for name in SHAPES)


def test_sophia_codes_its_curvature():
    found = []
    for engine in ("reference", "cpu"):
        opt, params = rlx_optim.Sophia(lr=1e-2, state_dtype="int8", engine=engine), start()
        opt.update_hessian("w", abs(start(7)["w"]).reshape(-1))  # flat, before the first step
        walk(opt, params, 3)
        opt.update_hessian("w", start(8)["w"])
        found.append((params, opt.state("w")))
    assert found[0][1]["h"].dtype == np.int8
    assert relative(found[0][0]["w"], found[1][0]["w"]) < 1e-5
    assert (found[0][1]["h"] != found[1][1]["h"]).mean() < 0.01


# ---- everywhere state goes ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["adamw", "muon", "soap", "lamb", "mars"])
@pytest.mark.parametrize("wanted", FORMATS)
def test_resumed_bit_for_bit(name, wanted, tmp_path):
    opt = made(name, state_dtype=wanted)
    params = walk(opt, start(), 3)
    opt.save(tmp_path / "a.safetensors")
    others = [rlx_optim.load(tmp_path / "a.safetensors"), copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))]
    branches = [{each: p.copy() for each, p in params.items()} for _ in others]
    walk(opt, params, 2, 3)
    for other, mine in zip(others, branches, strict=True):
        assert other.state_dtype == wanted
        walk(other, mine, 2, 3)
        assert all(np.array_equal(mine[each], params[each]) for each in SHAPES)
        for each in SHAPES:
            assert all(np.array_equal(a, opt.state(each)[slot]) for slot, a in other.state(each).items())


def test_formats_by_slot_and_by_group(tmp_path):
    opt = rlx_optim.AdamW(state_dtype={"m": "int8"}, groups=[{"match": "e", "state_dtype": {"v": "bfloat16"}}])
    walk(opt, start(), 2)
    kinds = {each: {slot: a.dtype.name for slot, a in opt.state(each).items()} for each in ("w", "e", "b")}
    assert kinds["w"] == {"m": "int8", "m_scale": "float32", "v": "float32"}
    assert kinds["e"] == {"m": "float32", "v": "uint16"}
    assert kinds["b"] == {"m": "float32", "v": "float32"}
    opt.save(tmp_path / "a.safetensors")
    again = rlx_optim.load(tmp_path / "a.safetensors")
    assert again.state_dtype == {"m": "int8"}
    assert again.hyperparameters("e")["state_dtype"] == {"v": "bfloat16"}


def test_files_are_of_version_2_only_where_state_is_coded(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    for wanted, version in (("float32", 1), ("int8", 2)):
        opt = rlx_optim.AdamW(state_dtype=wanted)
        walk(opt, start(), 1)
        path = opt.save(tmp_path / f"{wanted}.safetensors")
        assert f'format_version\\\\":{version}'.replace("\\\\", "\\") in path.read_bytes()[:4000].decode("utf8", "replace")
        tensors = safetensors.load_file(path)
        assert tensors["w/m"].dtype == (np.int8 if version == 2 else np.float32)


def test_nan_in_a_scale_is_not_saved_unless_asked(tmp_path):
    opt, params = rlx_optim.AdamW(state_dtype="int8"), start()
    grads = start(1)
    grads["w"][3, 5] = np.nan
    opt.step_all(params, grads)
    assert np.isnan(params["w"]).sum() == 1  # the step itself is by coordinate
    with pytest.raises(ValueError, match="m_scale of 'w' holds NaN"):
        opt.save(tmp_path / "a.safetensors")
    opt.save(tmp_path / "a.safetensors", allow_nan=True)
    walk(opt, params, 1)
    assert np.isnan(params["w"]).sum() == 128
    assert np.isnan(params["w"][3, :128]).all()


def test_damaged_scales_in_a_file_are_refused(tmp_path):
    opt = rlx_optim.AdamW(state_dtype="int8")
    walk(opt, start(), 1)
    opt._records["w"].state["m"].scale[3, 0] *= -1
    with pytest.raises(ValueError, match="tensor 'w/m_scale' has scales below zero"):
        opt.save(tmp_path / "a.safetensors")  # it is read back before it is there
    assert not (tmp_path / "a.safetensors").exists()


def test_nonfinite_gradients_leave_codes_alone():
    for policy in ("skip", "raise"):
        opt, params = rlx_optim.AdamW(state_dtype="int8", nonfinite=policy), start()
        walk(opt, params, 1)
        before, grads = {slot: a.copy() for slot, a in opt.state("w").items()}, start(1)
        grads["w"][3, 5] = np.inf
        if policy == "raise":
            with pytest.raises(ValueError, match="not finite"):
                opt.step_all(params, grads)
        else:
            opt.step_all(params, grads)
        assert all(np.array_equal(a, before[slot]) for slot, a in opt.state("w").items())


def test_converted_to_another_optimizer_and_another_format():
    opt = rlx_optim.AdamW(lr=1e-3, state_dtype="int8")
    walk(opt, start(), 3)
    same = opt.convert_to("nadamw", lr=1e-3, state_dtype="int8")
    assert np.array_equal(same.state("w")["v"], opt.state("w")["v"])
    wide = opt.convert_to("adamw", lr=1e-3)
    codes = opt.state("w")
    assert np.array_equal(wide.state("w")["m"], decode(NUMPY, Quantized(SIGNED, codes["m"], codes["m_scale"])))
    back = wide.convert_to("adamw", lr=1e-3, state_dtype="int8")
    assert (back.state("w")["m"] != codes["m"]).mean() < 1e-3


# ---- refused --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("adamw", "int4", 'AdamW: state_dtype must be one of "float32", "bfloat16", "int8", or a mapping'),
        ("adamw", {"m": "fp8"}, "AdamW: state_dtype must be one of"),
        ("adamw", {"w": "int8"}, "AdamW: state_dtype names 'w', which is no slot of this rule; it has 'm', 'v'"),
        ("soap", {"L1": "int8"}, r"SOAP: state_dtype: 'L1' \(factor\) stays exact; leave it out"),
        ("kronpsgd", {"q1": "bfloat16"}, r"KronPSGD: state_dtype: 'q1' \(factor\) stays exact"),
    ],
)
def test_refused_formats(name, given, message):
    with pytest.raises(ValueError, match=message):
        made(name, state_dtype=given)


def test_refused_changes_and_types():
    opt, params = rlx_optim.AdamW(state_dtype="int8"), start()
    with pytest.raises(TypeError, match="'w' is float64, and so is its state; state_dtype='int8' is for float32 parameters"):
        opt.step("w", params["w"].astype(np.float64), params["w"].astype(np.float64))
    walk(opt, params, 1)
    with pytest.raises(ValueError, match="state_dtype shapes the state and cannot change"):
        opt.state_dtype = "float32"
    with pytest.raises(TypeError, match="state_dtype"):
        rlx_optim.AdamW(state_dtype=lambda i: "int8")


def test_refused_by_an_engine_that_does_not_code():
    class Plain(rlx_optim.engines.reference.Reference):
        def allocate(self, slot):
            return np.zeros(slot.shape, np.float32)

    with pytest.raises(ValueError, match="state_dtype='int8': this engine keeps 'm' of 'w' as it is alone"):
        walk(rlx_optim.AdamW(state_dtype="int8", engine=Plain()), start(), 1)


def test_inspect_shows_values(tmp_path, capsys):
    """Formats and not parts; two files are compared by what their codes mean."""
    from rlx_optim.cli import main

    for name, wanted, steps in (("a", "int8", 2), ("b", "int8", 3), ("c", "float32", 2), ("d", {"m": "bfloat16"}, 2)):
        opt = rlx_optim.AdamW(state_dtype=wanted)
        walk(opt, start(), steps)
        opt.save(tmp_path / f"{name}.safetensors")

    def told(*names):
        main(["inspect", "--json", *(str(tmp_path / f"{name}.safetensors") for name in names)])
        return json.loads(capsys.readouterr().out)

    assert {row["parameter"]: row["state"] for row in told("a")["state"]} == {
        "w": "m in int8, v in int8", "e": "m in int8, v in int8", "b": "m, v", "s": "m, v",
    }  # fmt: skip
    assert told("d")["state"][0]["state"] == "m in bfloat16, v"
    assert told("a", "a")["equal"]
    apart = {line.partition(":")[0]: float(line.rpartition(" ")[2]) for line in told("a", "b")["differences"] if "/" in line}
    assert 0.1 < apart["w/m"] < 1
    assert 0 < apart["w/v"] < 0.1
    near = [line for line in told("a", "c")["differences"] if line.startswith("w/m:")]
    assert float(near[0].rpartition(" ")[2]) < 0.02

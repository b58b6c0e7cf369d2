"""Parameters spread over ranks give what one process gives. Real process groups (gloo), one set of processes a world size; see ranks.py."""

import functools
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed.checkpoint as dcp
from ranks import ALL, KINDS, MATRIX, REDUCING, STEPS, TOGETHER, coded_ranks, reading_ranks

import rlx_optim.torch as ours
from rlx_optim.checkpoint.files import open_checkpoint
from rlx_optim.partition import extent, share_out, traffic
from rlx_optim.program import NotSent, Unsent
from rlx_optim.reading import reads_p
from rlx_optim.registry import spec_class
from rlx_optim.torch.groups import spec_of

WORLDS = (2, 3, 4)
LIMIT = 400  # seconds for a world, on a busy machine too; a collective that nobody answers ends after 60
sizes_and_names = pytest.mark.parametrize(
    ("size", "name"),
    [(2, name) for name in ALL]
    + [pytest.param(size, name, marks=[pytest.mark.slow] * (size == 4)) for size in (3, 4) for name in KINDS],
)
pytestmark = [
    pytest.mark.usefixtures("one_thread"),  # as in the ranks: products depend on it in the last bit
    pytest.mark.timeout(1000),  # the first test of a world runs it, and that of two ranks before it
]


@functools.cache
def reference(name, size, steps=STEPS, holes=True):
    return ranks.reference(name, size, steps, holes)


class Results:
    """By world size: {scenario: what each rank gave}, for `killed` what rank 0 gave. A world runs when it is first asked for."""

    def __init__(self, folder):
        self.folder, self.found = folder, {}
        for name in ALL:  # compiles what the ranks then find compiled
            params = ranks.parameters(ranks.plain)
            opt = ranks.make(name, params)
            ranks.train(opt, params, 0, STEPS)
            opt.save(folder / f"single.{name}.safetensors")

    def __getitem__(self, size):
        for each in (2, size):  # the others load what two ranks saved
            if each not in self.found:
                try:
                    self.found[each] = spawned(each, self.folder)
                except AssertionError as problem:  # which every test says at once: to run the world again would take minutes
                    self.found[each] = problem
            if isinstance(self.found[each], AssertionError):
                raise self.found[each]
        return self.found[size]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return Results(tmp_path_factory.mktemp("ranks"))


def spawned(size, folder):
    context = multiprocessing.get_context("forkserver")  # whatever they import is imported once
    context.set_forkserver_preload(["ranks"])
    processes = [context.Process(target=ranks.main, args=(rank, size, str(folder))) for rank in range(size)]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OPENBLAS_NUM_THREADS", "1")  # the matrices are tiny, the processes many
        environment.setenv("TRITON_INTERPRET", "1")
        for process in processes:
            process.start()
    deadline = time.monotonic() + LIMIT
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    files = [folder / f"results{size}.{rank}.pt" for rank in range(size)]
    found = [torch.load(file, weights_only=False) if os.path.exists(file) else {} for file in files]
    problems = [value for each in found for value in each.values() if isinstance(value, str)]
    assert [hanging, problems] == [[], []], f"world of {size}: ranks {hanging} hang\n" + "\n".join(problems)
    assert [function.__name__ for function in ranks.SCENARIOS[size]] == list(found[0])
    return found[0]


def close(got, want, tolerance):
    """Bit for bit where tolerance is 0, else relative to the largest value of each tensor."""
    assert got.keys() == want.keys()
    for k in want:
        if tolerance == 0:
            assert torch.equal(got[k], want[k]), k
        else:
            gap = (got[k].double() - want[k].double()).abs().max() if got[k].numel() else torch.zeros(())
            assert gap <= tolerance * want[k].double().abs().max(), (k, float(gap))


def tolerance(name):
    return 1e-5 if name == "Prodigy" else 1e-6 if name in REDUCING else 0  # d multiplies what rounding does


# ---- the same as one process ------------------------------------------------------------------------------------------------
@sizes_and_names
def test_sharded_equals_one_process(results, size, name):
    params, state = results[size]["parity"][0][name]
    want, kept = reference(name, size)
    close(params, want, tolerance(name))
    close(state, kept, 10 * tolerance(name))


@pytest.mark.parametrize(("name", "how", "kept"), ranks.ROUNDED)
def test_parameters_of_16_bits_are_rounded_as_in_one_process(results, single_rounded, name, how, kept):
    """An element's noise is of its place in the whole tensor; its low half lies beside it; and both are resumed."""
    given = results[2]["rounded"][0]
    params, state = given[name, how, kept, "end"]
    want, its = single_rounded[name, how, kept, "end"]
    near = tolerance(name)  # sums of ranks may differ in the last place, and then a number may be rounded the other way
    close(params, want, 2**-7 if near else 0)
    assert sum(int((params[k] != want[k]).sum()) for k in want) <= (3 if near else 0)
    assert ("0 low" in state) == (how == "exact")
    if not near:
        close(state, its, 0)
    for way in ("loaded", "file"):
        again, its = given[name, how, kept, way]
        close(again, params, 0)
        close(its, state, 0)


@pytest.fixture(scope="module")
def single_rounded():
    return ranks.rounded(None)


def test_averages_of_shards(results):
    """Schedule-Free's point of evaluation is that of one process, and training does not notice that it was taken."""
    before, average, after, end, resumed, refused = results[2]["averaged"][0]
    assert "evaluation mode" in refused
    close(after, before, 0)
    want = ranks.parameters(ranks.plain)
    opt = ranks.make("ScheduleFreeAdamW", want)
    ranks.train(opt, want, 0, STEPS // 2)
    with opt.averaged():
        close(average, ranks.wholes(want), 0)
    ranks.train(opt, want, STEPS // 2, STEPS)
    close(end, ranks.wholes(want), 0)
    close(resumed, end, 0)


def test_a_state_dict_of_evaluation_mode_is_loaded_into_any_layout(results):
    assert results[2]["evaluated_elsewhere"] == [[True] * 4] * 2


def test_modified_rules_equal_one_process(results):
    found, want = results[2]["modified"][0], ranks.modified(None)
    for name in ranks.MODIFIED:
        close(found[name], want[name], 1e-6)
    assert "Muon: decay='hyperball' needs the norm of a whole matrix, and 'w' is shared out over ranks" in found["refused"]


def test_what_one_rank_leaves_out_all_leave_out(results):
    every, want = results[2]["guarded"], ranks.guarded(None)
    for name in ("AdamW", "Muon"):
        for found in every:
            close(found[name][0], want[name][0], 1e-6)
            assert found[name][1:] == want[name][1:] == (2, [68, 70])


@pytest.mark.parametrize("name", TOGETHER)
def test_what_a_rank_lacks_counts_as_zeros(name):
    """The reference of the test above is another one than without the missing part."""
    close(reference(name, 2)[0], reference(name, 2)[0], 0)
    assert not torch.equal(reference(name, 2)[0]["wide"], reference(name, 3)[0]["wide"])


@pytest.mark.parametrize(("way", "name"), ranks.WAYS)
def test_two_dimensional_meshes_equal_one_process(results, way, name):
    params, state = results[4]["meshes"][0][way, name]
    want, kept = reference(name, 1, holes=False)
    close(params, want, tolerance(name))
    close(state, kept, 10 * tolerance(name))


def test_what_is_refused_on_a_replica_is_refused_on_all(results):
    for rank, found in enumerate(results[4]["meshes"]):
        for problem, still in found["refused"]:
            assert ("lr must be" if rank == 1 else "refused on another rank") in problem
            assert still


def one_process(name, model, keep=lambda name: True, **settings):
    opt = getattr(ours, name)(
        [(k, p) for k, p in model.named_parameters() if keep(k)] if settings.pop("by_name", 0) else model, **settings
    )
    ranks.losses(model, opt)
    return {k: p.detach() for k, p in model.named_parameters()}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "Muon", "SOAP", "AdamW offloaded", "Lamb offloaded", "Muon offloaded"])
def test_fully_shard_equals_one_process(results, name, size):
    want = one_process(name.split()[0], ranks.net(), lr=0.01)
    got = dict(zip(want, results[size]["fully_sharded"][0][name], strict=True))
    close(got, want, 1e-6)


@pytest.fixture(scope="module")
def single_packed():
    return ranks.packed(None)


@pytest.mark.parametrize("way", ["fsdp", "ddp"])
@pytest.mark.parametrize("title", ranks.PACKING)
def test_what_modules_pack_is_split_on_ranks_as_in_one_process(results, single_packed, title, way):
    """nn.TransformerEncoderLayer and nn.GRUCell, spread before the optimizer is made: bit for bit; resumed by torch's helpers."""
    want, report = single_packed[title, ""]
    for given in results[2]["packed"]:
        params, shown = given[title, way]
        assert all(torch.equal(a, b) for a, b in zip(params, want, strict=True))
        assert shown == report
        assert given[title, "helpers"]
    assert report.count(" of MultiheadAttention)") == 1
    assert report.count("(gates of GRUCell)") == 2
    model = ranks.Packed()
    kind, settings = getattr(ours, title.split()[0]), ranks.PACKING[title]
    kind(model, **settings).load(results.folder / f"packed.{title}.safetensors")  # into one process


@pytest.mark.parametrize("name", ["AdamW", "Lamb", "Adafactor", "Muon"])
def test_fully_shard_over_tensor_parallel(results, name):
    got, kinds, report = results[4]["fsdp_and_tensor_parallel"][0][name]
    want = one_process(name, ranks.net(), lambda k: not k.startswith("4"), lr=0.01, by_name=True)
    close(got, want, 2e-5)  # torch's own sums over ranks are in another order
    assert "_StridedShard" in kinds
    assert name != "Muon" or any("gathered whole" in lane for lane in report)


@pytest.mark.parametrize("engine", ranks.ENGINES)
@pytest.mark.parametrize("name", ["NAdamW", "Lamb", "Muon", "SOAP"])
def test_other_engines_equal_one_process(results, name, engine):
    params = ranks.parameters(ranks.plain)
    ranks.train(ranks.make(name, params, engine="torch"), params, 0, 5)
    close(results[2]["engines"][0][engine, name], ranks.wholes(params), 2e-5 if engine == "triton" and name in MATRIX else 1e-6)


def test_mixed_dtypes_split_matrices_late_groups_and_a_stop_from_one_rank(results):
    given = results[3]["mixed"][0]
    close(given["sharded"][0], given["single"][0], 0)
    close(given["sharded"][1], given["single"][1], 0)
    assert given["single"][1]["0 step"] == 3  # of four: one was stopped
    close(given["sharded, clipped"], given["single, clipped"], 0)


# ---- rules that read p ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def readers():
    return reading_ranks.walked(None)


def alike(got, want):
    for found, expected in zip(got, want, strict=True):
        close(found, expected, 0)


@pytest.mark.parametrize("size", [2, 3])
def test_owners_see_p_where_the_rule_reads_it(results, readers, size):
    """Bit for bit: coupled decay, averages of p, Stiefel, Lookahead, factors of p; in 16 bits, coded, split, in stages."""
    for given in results[size]["walked"]:
        assert given.keys() == readers.keys()
        assert given.pop("exchanges") > 2 * reading_ranks.STEPS
        for case, found in given.items():
            alike(found, readers[case])


def test_replicas_owners_see_p(results, readers):
    for given in results[2]["reading_under_ddp"]:
        for kind, found in given.items():
            close(found, readers[kind][0], 0)


def test_owners_on_two_dimensional_meshes_see_p(results, readers):
    exact = reading_ranks.ended("CoupledMuon", ranks.plain, torch.bfloat16, reading_ranks.CUT, rounding="exact")
    given = results[4]["reading_on_meshes"][0]
    assert len(given) == 3 * (len(reading_ranks.KINDS) + 1)
    for (_, kind), found in given.items():
        alike(found, exact if kind == "exact" else readers[kind])


def test_p_travels_only_where_it_is_read(results):
    """In the same exchange, and not while the decay that reads it is 0."""
    want, _ = reading_ranks.decay_comes_and_goes(None)
    for rank, (found, sent) in enumerate(results[2]["decay_comes_and_goes"]):
        close(found, want, 0)
        entries = [
            [(shape, reading_ranks.Ignoring(weight_decay=decay)) for shape in reading_ranks.ROWS.values()]
            for decay in reading_ranks.DECAYS
        ]
        assert sent == [(traffic(each, 2).sent[rank], 2) for each in entries]


def test_a_commit_that_measures_is_refused_by_name(results):
    for told in results[2]["a_commit_that_measures"]:
        assert told.startswith(
            "ValueError: Measuring: its commit needs the norm of a whole matrix, and 'w' is shared out over ranks"
        )


@pytest.mark.parametrize("size", [2, 3])
def test_an_update_that_raises_on_its_owner_is_raised_everywhere(results, size):
    params = ranks.parameters(ranks.plain, reading_ranks.CUT)
    opt = ours.made(reading_ranks.Failing)(list(params.items()))
    reading_ranks.Failing.failing = False
    ranks.train(opt, params, 0, reading_ranks.STEPS, missing=lambda t: ("wide",) if t == 2 else ())
    owners = 0
    for found, state, told in results[size]["an_owner_fails"]:
        close(found, ranks.wholes(params), 0)
        close(state, ranks.state_of(opt), 0)
        owners += told[2] == "ArithmeticError: no step of wide"
        assert told[2].startswith(("ArithmeticError", "RemoteError: the update of 'wide' failed on another rank, its owner"))
        assert told[:2] + told[3:] == [None] * (reading_ranks.STEPS - 1)
    assert owners == 1


@pytest.mark.parametrize("shape", [(24, 16), (1, 7), (4, 3, 3, 2), (4096, 14336), (50257, 768)])
def test_what_reads_p_is_found_out(shape):
    for name in MATRIX:
        assert not reads_p(spec_class(name.lower())(), shape), name
    found = {title: reads_p(kind(), shape) for title, kind in reading_ranks.RULES.items() if kind().takes(shape) is None}
    assert all(found.values()), found
    assert not reads_p(reading_ranks.Ignoring(weight_decay=0.0), shape)
    assert not reads_p(spec_class("kronpsgd")(probe=lambda name, t, shape: pytest.fail("asked for noise")), shape)


def test_what_was_not_sent_tells_its_shape_alone():
    p = Unsent("Rule", torch.ones(2, 3, 4))
    assert (p.shape, p.ndim, p.dtype, p.numel()) == ((2, 3, 4), 3, torch.float32, 24)
    ways = [lambda: p + 1, lambda: 2.0 * p, lambda: torch.ones(2, 3, 4) * p, lambda: torch.linalg.norm(p), lambda: p.mT]
    ways += [lambda: p[0], lambda: p == p, lambda: float(p), lambda: torch.stack([p]), lambda: p.clone, lambda: list(p)]
    for way in ways:
        with pytest.raises(NotSent, match="which was not sent here"):
            way()


# ---- DDP ------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [2, 3])
def test_a_ddp_model_is_shared_out(results, size):
    everyone = results[size]["data_parallel"]
    want = one_process("Muon", ranks.net(), lr=0.02)
    for given in everyone:
        close(dict(zip(want, given["params"], strict=True)), want, 1e-6)
        close(given["state"], everyone[0]["state"], 0)
        close(given["loaded"], given["state"], 0)
        assert given["alone"]
        assert given["refusal"].startswith(
            "RuntimeError: Muon: the state is shared out among ranks; call consolidate_state_dict()"
        )
        for name in MATRIX:
            params = ranks.parameters(ranks.plain)
            ranks.train(ranks.make(name, params), params, 0, STEPS, ranks.plain, lambda t: ("odd",) if t == 3 else ())
            close(given["shared"][name], ranks.wholes(params), 0)
    matrices = [p for p in ranks.net().parameters() if p.ndim > 1][:-1]  # the last is the head
    assert sum(given["held"] for given in everyone) == sum(p.numel() for p in matrices)
    assert max(given["held"] for given in everyone) < sum(p.numel() for p in matrices)
    opt = ours.Muon(ranks.net())
    opt.load(results.folder / f"ddp{size}.safetensors")
    close(ranks.state_of(opt), everyone[0]["state"], 0)


# ---- checkpoints -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "size", "way"),
    [(name, 3, "dcp") for name in ALL]
    + [(name, 3, way) for name in KINDS for way in ("own", "single")]
    + [pytest.param(name, 4, "dcp", marks=pytest.mark.slow) for name in KINDS],
)
def test_ten_steps_on_two_ranks_and_ten_on_others_are_twenty(results, name, size, way):
    params, state = results[size]["resumed"][0][name, way]
    want, kept = reference(name, 1, 2 * STEPS, False)
    loose = 10 * tolerance(name)  # the ten steps before were summed in another order
    close(params, want, loose)
    close(state, kept, 10 * loose)


@pytest.mark.parametrize("name", ALL)
def test_a_file_of_a_sharded_run_is_read_by_one_process(results, name):
    params = ranks.parameters(ranks.plain)
    opt = ranks.make(name, params)
    assert results[2]["saved"] == [None, None]
    opt.load(results.folder / f"{name}.safetensors")
    close(ranks.state_of(opt), reference(name, 1, STEPS, False)[1], 10 * tolerance(name))


def test_whole_and_flat_state_dicts_of_torch(results):
    first, second = results[2]["model_state_dicts"]
    assert first[True] == (True, 2)
    assert second[True] == (True, 0)
    assert first[False][0]
    assert second[False][0]
    assert first[False][1] == second[False][1] > 10


@pytest.mark.parametrize("name", ["AdamW", "Muon", "SOAP"])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_state_of_thawed_layers_is_loaded(results, name, frozen):
    without, same = results[2]["thawed"][0][name, frozen]
    assert not any(without)
    assert same


def test_a_rank_killed_during_a_save_leaves_the_checkpoint_before(results):
    given = results[2]["killed"]
    assert given["same"]
    assert given["left"] == ["killed.safetensors"]
    assert given["problem"] is not None
    with open_checkpoint(results.folder / "killed.safetensors") as snapshot:
        assert snapshot.iteration == 1


# ---- state in fewer bits --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", coded_ranks.CASES, ids=str)
def test_coded_shards_equal_one_process(results, case):
    """Bit for bit, but where rows are cut: there codes are none, and bfloat16 is rounded by other places."""
    (params, state), (want, kept) = results[2]["coded"][0][case], coded_ranks.both(*coded_ranks.walked(*case))
    close(params, want, 2e-3)
    if case[0] == "Lamb":  # its norms are summed in another order
        return
    but = ("side",) if case[0] == "AdamW" else ()
    coded_ranks.exactly(state, kept, but)
    if case[0] == "AdamW":  # products depend on the number of threads in the last bit
        coded_ranks.exactly(params, want, but)
    codes, first = getattr(torch, case[1]), "exp_avg" if case[0] == "AdamW" else "momentum_buffer"
    assert state[f"w {first}"].dtype is codes
    assert state[f"side {first}"].dtype is (torch.float32 if case == ("AdamW", "int8") else codes)


@pytest.mark.parametrize("case", coded_ranks.CASES, ids=str)
def test_codes_are_spread_anew_bit_for_bit(results, case):
    """Two ranks, four, one: by torch's checkpoints and by a file of ours; and the steps after are those of one process."""
    state = results[2]["coded"][0][case][1]
    found = [there for (*its, _), there in results[4]["coded_elsewhere"][0].items() if tuple(its) == case]
    for there, _ in found:
        coded_ranks.exactly(there[1], state)
    but = ("side",) if case[0] != "Muon" else ()
    params, opt = coded_ranks.walked(*case)
    coded_ranks.walked(*case, start=coded_ranks.STEPS, opt=opt, params=params)
    for _, end in found if case[0] == "AdamW" else ():
        coded_ranks.exactly(end[0], coded_ranks.both(params, opt)[0], but)
    cut = case[1] == "int8" and bool(but)
    shapes = {k: v for k, v in coded_ranks.SHAPES.items() if not (cut and k == "side")}
    params = ranks.parameters(ranks.plain, shapes)
    opt = ranks.make(case[0], params, state_dtype=case[1])
    into = {"opt": {"state": ranks.by_name(opt)["state"]}}
    dcp.load(into, checkpoint_id=results.folder / f"coded4.{case[0]}.{case[1]}", no_dist=True)
    coded_ranks.exactly(
        {f"{name} {k}": v for name, each in into["opt"]["state"].items() for k, v in each.items()}, state, ("side",) * cut
    )
    opt = ranks.make(case[0], ranks.parameters(ranks.plain, coded_ranks.SHAPES), state_dtype=case[1])
    opt.load(results.folder / f"coded.{case[0]}.{case[1]}.safetensors")
    coded_ranks.exactly(coded_ranks.both({}, opt)[1], state, ("side",) * cut)
    if cut:  # numbers there, codes here: torch's checkpoints cannot, ours can
        whole = {"opt": {"state": ranks.by_name(opt)["state"]}}
        with pytest.raises(dcp.api.CheckpointException, match="exp_avg_scale"):
            dcp.load(whole, checkpoint_id=results.folder / f"coded4.{case[0]}.{case[1]}", no_dist=True)
        assert opt.state[opt.param_groups[0]["params"][2]]["exp_avg"].dtype is torch.int8


def test_coded_shards_on_two_dimensional_meshes(results):
    for (way, *case), (params, state) in results[4]["coded_meshes"][0].items():
        want, kept = coded_ranks.both(*coded_ranks.walked(*case))
        close(params, want, 2e-3)
        cut = [k for k in want if state[f"{k} exp_avg"].dtype != kept[f"{k} exp_avg"].dtype]
        assert cut == (["w", "even", "side", "thin"] if way == "both" else [])  # of matrices the rows; "conv" has more dimensions
        coded_ranks.exactly(state, kept, tuple(cut))


def test_coded_models_and_torchs_state_dicts(results):
    for each in results[2]["coded_models"]:
        assert "'momentum_buffer_scale' of '0.weight' has scales below zero. The checkpoint is corrupt" in each["damaged"][0]
        assert each["damaged"][1]
        assert each.pop("ddp")[1:] == (True, True)
        for name in ("AdamW", "Muon"):
            assert each[name, "back"] <= 1
            assert each[name, "kinds"] == ["torch.float32", "torch.float64"]
            assert each[name, True]
            assert each[name, False]


# ---- what travels ---------------------------------------------------------------------------------------------------------------
@sizes_and_names
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_sent_are_those_documented(results, size, name, dtype):
    params = ranks.parameters(ranks.plain, ranks.CUT, dtype)
    opt = ranks.make(name, params)
    shapes = {p: tuple(p.shape) for p in params.values()}
    specs = [(shapes[p], spec_of(opt, group)) for group in opt.param_groups for p in group["params"]]
    wanted = traffic(specs, size, dtype.itemsize)
    given = [each[name, str(dtype)] for each in results[size]["bytes_sent"]]
    assert [each["sent"] for each in given] == wanted.sent
    assert all(each["all_reduced"] == wanted.all_reduced for each in given)
    assert all(each["all_to_alls"] == (2 if name in MATRIX else 0) for each in given)
    assert all(each["torch"] == each["all_to_alls"] + len(each["all_reduced"]) for each in given)  # nothing went past us
    assert len(wanted.all_reduced) == {"Lamb": 2, "LARS": 2, "StableAdamW": 2, "MARS": 2, "Prodigy": 2, "Adafactor": 5}.get(
        name, 1 if name in MATRIX else 0
    )


def test_ddp_sends_updates_alone(results):
    everyone = [given["log"] for given in results[3]["data_parallel"]]
    opt = ours.Muon(ranks.net(), lr=0.02)
    specs = [(tuple(p.shape), spec_of(opt, group)) for group in opt.param_groups for p in group["params"]]
    assert [each["sent"] for each in everyone] == [5 * sent for sent in traffic(specs, 3, dim=None).sent]


def test_owners_are_balanced_and_the_same_for_all():
    loads = [0] * 4
    assert share_out([5, 1, 1, 1, 4, 3], loads) == [0, 3, 3, 3, 1, 2]
    assert loads == [5, 4, 3, 3]
    assert share_out([2, 1], loads) == [2, 3]  # newcomers join the least busy; nobody moves
    assert [extent(5, 4, rank) for rank in range(4)] == [(0, 2), (2, 2), (4, 1), (5, 0)]


# ---- agreement ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["AdamW", "Lamb", "Muon"])
def test_what_is_not_finite_on_one_rank_stops_all(results, size, name):
    for rank, given in enumerate(results[size]["not_finite"]):
        assert given[name, "skip"] == (None, 1, True)
        problem, skipped, still = given[name, "raise"]
        assert problem.startswith(
            f"ValueError: {name}: gradient of 'w'" if rank == 1 else f"ValueError: {name}: a gradient on another"
        )
        assert skipped == 0
        assert still


def test_refusals(results):
    first, second = results[2]["refused"]
    for given in (first, second):
        assert given["partial"].startswith("ValueError: AdamW: parameter 'w' is a partial sum")
        assert "call step() instead" in given["attach"]
        assert "split is for rules on whole matrices" in given["split"]
        assert "use update_hessian_from_gradients" in given["hessian"][0]
        assert given["hessian"][1:] == (True, True)
    assert first["one rank"].startswith("RemoteError")
    assert "its gradient on" in second["one rank"]
    for name in ("Lamb", "Muon", "Sophia"):
        for t in range(2):
            assert first[name, t] == (
                "RemoteError: a gradient or a setting was refused on another rank, which says why; nothing was stepped",
                True,
            )
            assert second[name, t] == (f"ValueError: {name}: lr must be a finite number >= 0, got -1.0", True)
    assert first["closure"] == (
        ["RemoteError: a gradient or a setting was refused on another rank, which says why; nothing was stepped"] * 2,
        True,
    )
    assert second["closure"] == (["KeyError: 'no such batch'"] * 2, True)
    assert any("sums over ranks are taken by the torch engine" in line for line in first["engine"])
    assert first["file"].startswith("RemoteError: the checkpoint was refused on another rank")
    assert "missing" in second["file"]


def test_what_one_rank_cannot_lay_out_is_refused_on_all(results):
    first, second = results[2]["refused_while_laid_out"]
    for (name, change), (problem, still, steps) in first.items():
        assert problem.startswith("RemoteError: a ")
        assert "on another rank, which says why" in problem
        other, also, counts = second[name, change]
        assert change == "damaged" or "lr must be" in other
        assert "RemoteError" not in other
        assert still
        assert also
        assert steps == counts == {k: 1.0 if (k, change) == ("odd", "thawed") else 2.0 for k in steps}


def test_what_one_rank_has_otherwise_is_refused_on_all(results):
    """A setting or a layout by which ranks would send each other different things; state, mode or loss that one cannot use."""
    first, second = results[2]["refused_on_one"]
    ends = {name: first.pop(name) for name in ("loss", "save", "saved", "load", "size", "loaded")}
    for (name, what), (found, gap) in first.items():
        assert gap <= {"Lamb": 1e-6}.get(name, 0)
        for (problem, still), (other, also) in zip(found, second[name, what][0], strict=True):
            assert still
            assert also
            if what in ("state", "hessian", "evaluation"):
                assert problem.startswith("RemoteError: a gradient or a setting was refused on another rank")
                assert ("evaluation mode" if what == "evaluation" else "'exp_avg'") in other
            else:
                assert problem == other
                assert f"RuntimeError: {name}: ranks step parameters together that are listed, frozen or set otherwise" in problem
    assert "RemoteError" in ends["loss"][0]
    assert "Muon: loss is for skip_above and must be a number, got '1.0x'" in second["loss"][0]
    assert ends["loss"][1] is second["loss"][1] is None
    assert ends["save"].startswith("RemoteError: the checkpoint was not written on another rank")
    assert "'exp_avg' of 'b'" in second["save"]
    assert ends["saved"] == second["saved"] == (None, True)
    for key, words in {"load": "'step' of 'w' is", "size": "different number of parameter groups"}.items():
        assert ends[key] == ("RemoteError: the state dict was refused on another rank, which says why", True)
        assert words in second[key][0]
        assert second[key][1]
    assert ends["loaded"] is second["loaded"] is None


def test_copies_and_pickles_on_ranks_go_on(results):
    for found in results[2]["copied"]:
        assert len(found) == 8
        assert all(found.values())


def test_tensors_without_elements_count_alike(results):
    assert results[2]["empty_tensors"] == [True, True]


@pytest.mark.parametrize("size", [2, 3])
def test_clipping_by_the_norm_over_all_ranks(results, size):
    given = results[size]["clipped"][0]
    for name in ("AdamW", "Lamb", "Muon"):
        params = ranks.parameters(ranks.plain)
        opt = ranks.make(name, params)
        for t in range(3):
            for k, g in ranks.tensors(t).items():
                params[k].grad = g
            norm = torch.nn.utils.clip_grad_norm_(params.values(), 0.5)
            opt.step()
        assert given[name][0] == pytest.approx(float(norm), rel=1e-6)
        close(given[name][1], ranks.wholes(params), 2e-6)
    total, grads, reduced, orders = given["written"]
    for k, g in ranks.tensors(0).items():
        params[k].grad = g
    for order, found in orders.items():
        assert found == pytest.approx(float(torch.nn.utils.get_total_norm([p.grad for p in params.values()], order)), rel=1e-6)
    assert total == pytest.approx(float(torch.nn.utils.clip_grad_norm_(params.values(), 0.5)), rel=1e-6)
    close(grads, {k: p.grad for k, p in params.items()}, 1e-6)
    assert reduced == [8]  # one number, once


def test_clipping_plain_parameters_is_torchs():
    params, twins = ranks.parameters(ranks.plain), ranks.parameters(ranks.plain)
    for k, g in ranks.tensors(0).items():
        params[k].grad, twins[k].grad = g, g.clone()
    assert float(ours.clip_grad_norm_(params.values(), 0.5)) == pytest.approx(
        float(torch.nn.utils.clip_grad_norm_(twins.values(), 0.5)), rel=1e-6
    )
    close({k: p.grad for k, p in params.items()}, {k: p.grad for k, p in twins.items()}, 1e-6)
    ours.clip_grad_norm_(ranks.make("AdamW", params), 0.1)
    torch.nn.utils.clip_grad_norm_(twins.values(), 0.1)
    close({k: p.grad for k, p in params.items()}, {k: p.grad for k, p in twins.items()}, 1e-6)
    with pytest.raises(ValueError, match="max_norm must be >= 0"):
        ours.clip_grad_norm_(params.values(), -1.0)
    params["w"].grad[0, 0] = float("inf")
    with pytest.raises(RuntimeError, match="is inf; not clipped"):
        ours.clip_grad_norm_(params.values(), 1.0, error_if_nonfinite=True)


def test_plain_parameters_do_not_notice():
    opt = ranks.make("Muon", ranks.parameters(ranks.plain))
    opt.step()
    assert opt._homes is None
    assert opt._consensus is None


# ---- the example ------------------------------------------------------------------------------------------------------------------
def test_the_example(tmp_path):
    """Two ranks by torchrun, on the CPU."""
    example = Path(__file__).parent.parent / "examples" / "fsdp2_muon.py"
    # gloo's threads may still hold a tensor, and abort where the interpreter is ending (pytorch#65231)
    code = f"import os, runpy, sys; runpy.run_path({str(example)!r}, run_name='__main__'); sys.stdout.flush(); os._exit(0)"
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--no-python"]
    command = [*run, sys.executable, "-c", code, "--steps", "6"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "each matrix on its owner, one of 2 ranks" in done.stdout
    assert "at the end, on 2 ranks" in done.stdout

"""The exchange of owners goes in stages, beside what they compute: the same bits, the bytes that `partition.traffic` says."""

import multiprocessing

import pytest
import ranks
import torch
import torch.distributed as dist
from ranks import CUT, MATRIX, counting, make, parameters, plain, train, wholes
from test_qk_clip import clipped

from rlx_optim import partition
from rlx_optim.partition import traffic
from rlx_optim.registry import spec_class
from rlx_optim.torch.groups import spec_of

pytestmark = pytest.mark.usefixtures("one_thread")  # as in the ranks
WORLDS = (2, 4)
STEPS = 4


def in_stages(world):
    """Matrix rules with as many stages as there are: on shards, and under DDP."""
    partition.STAGE, out = 1, {}
    for name in MATRIX:
        for place, settings in ((world.place, {}), (plain, {"process_group": dist.group.WORLD})):
            params = parameters(place, CUT)
            opt = make(name, params, **settings)
            with counting(world.rank) as log:
                train(opt, params, 0, STEPS, place)
            out[name, bool(settings)] = wholes(params), log
    return out


SCENARIOS = {size: [in_stages, clipped] for size in WORLDS}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def world(request, tmp_path_factory):
    """A size, and what each rank of a world gave."""
    size, folder = request.param, tmp_path_factory.mktemp("ranks")
    for name in MATRIX:  # compiles what the ranks then find compiled
        alone(name)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_stages"])
    processes = [context.Process(target=ranks.main, args=(rank, size, str(folder), SCENARIOS)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(150)
        if process.is_alive():
            process.kill()
    return size, torch.load(folder / f"results{size}.0.pt", weights_only=False)


def alone(name):
    params = parameters(plain, CUT)
    opt = make(name, params)
    train(opt, params, 0, STEPS)
    return params, [(tuple(p.shape), spec_of(opt, group)) for group in opt.param_groups for p in group["params"]]


@pytest.mark.parametrize("name", MATRIX)
def test_an_exchange_in_stages_gives_the_same_bits(world, name, monkeypatch):
    size, results = world
    monkeypatch.setattr(partition, "STAGE", 1)
    params, specs = alone(name)
    for ddp in (False, True):
        wanted = traffic(specs, size, dim=None if ddp else 0)
        given = [each[name, ddp] for each in results["in_stages"]]
        assert wanted.stages > 1
        assert [log["sent"] for _, log in given] == [STEPS * sent for sent in wanted.sent]
        assert all(log["all_to_alls"] == STEPS * wanted.stages * (1 if ddp else 2) for _, log in given)
        for moved, _ in given:
            for k, p in wholes(params).items():
                assert torch.equal(moved[k], p), (k, ddp)


def test_qk_clip_on_ranks(world):
    """Of DTensors, with and without low halves: the bits of one process."""
    alone = clipped(None)
    for given in world[1]["clipped"]:
        for dtype, tensors in alone.items():
            assert len(tensors) == (4 if "bfloat" in dtype else 2)
            for one, other in zip(given[dtype], tensors, strict=True):
                assert torch.equal(one, other)


def test_stages_share_out_each_owners_work():
    """Every matrix is in one, no stage of an owner is much dearer than another, and all but the ends goes beside computing."""
    shapes = [(512, 512), (512, 2048)] * 24
    spec = spec_class("muon")()
    work = [spec.work(shape) for shape in shapes]
    owners = partition.share_out(work, [0] * 4)
    stages = partition.staged(work, owners, shapes, 4)
    assert len(stages) == partition.STAGES
    assert sorted(i for stage in stages for i in stage) == list(range(len(shapes)))
    for rank in range(4):
        loads = [sum(work[i] for i in stage if owners[i] == rank) for stage in stages]
        assert max(loads) <= sum(loads) / len(loads) + max(work)
    told = traffic([(shape, spec) for shape in shapes], 4)
    assert told.stages == len(stages)
    assert all(0.6 * sent < hidden < 0.85 * sent for sent, hidden in zip(told.sent, told.hidden, strict=True))


def test_little_goes_at_once():
    told = traffic([((8, 8), spec_class("muon")())] * 5, 4)
    assert (told.stages, told.hidden) == (1, [0] * 4)
    assert traffic([((8, 8), spec_class("adamw")())], 4).stages == 0


def test_updates_alone_are_hidden_under_ddp():
    entries = [((1024, 1024), spec_class("muon")())] * 16
    told = traffic(entries, 2, dim=None)
    assert told.stages == 4
    assert told.hidden == [3 * sent // 4 for sent in told.sent]


@pytest.mark.parametrize(("form", "each"), [("float32", 4.0), ("bfloat16", 2.0), ("int8", 1 + 4 / 128)])
def test_state_is_counted_as_it_is_kept(form, each):
    spec = spec_class("muon")(state_dtype=form)
    assert sum(traffic([((256, 512), spec)], 2).state) == each * 256 * 512

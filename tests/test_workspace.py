"""Memory that the cpu engine keeps for large matrices."""

import threading

import numpy as np
import pytest

import rlx_optim
from rlx_optim.engines.cpu import matrices, workspace

SHAPE = (1024, 1024)  # of float32: as little as is kept

pytestmark = pytest.mark.skipif(workspace.FREE is None, reason="no MADV_FREE on this system")


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    monkeypatch.setattr(workspace, "cache", workspace.WorkspaceCache())


def start(array):
    return array.__array_interface__["data"][0]


def test_memory_is_given_to_the_next_once_nothing_refers_to_it():
    first = workspace.empty(SHAPE, np.float32)
    where, part = start(first), first[5:6, 3:]
    second = workspace.empty(SHAPE, np.float32)
    assert start(second) != where
    del first
    assert start(workspace.empty(SHAPE, np.float32)) != where  # a part of it is still there
    del part
    assert start(workspace.empty(SHAPE, np.float32)) == where
    assert len(workspace.cache.mappings) == 3


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_in_use_is_left_alone(dtype):
    one, other = workspace.empty(SHAPE, dtype), workspace.empty(SHAPE, dtype)
    one[...], other[...] = 1, 2
    turned = one.T
    del one, other
    for _ in range(3):
        workspace.release_unused()
        workspace.empty(SHAPE, dtype)[...] = 3
    assert (turned == 1).all()


def test_a_room_is_at_most_twice_what_is_asked():
    large = start(workspace.empty((2048, 2048), np.float32))
    assert start(workspace.empty((1025, 1024), np.float32)) != large
    assert start(workspace.empty((1500, 2048), np.float64)) != large  # and no less
    assert start(workspace.empty((1500, 2048), np.float32)) == large


def test_little_memory_is_not_kept():
    workspace.empty((1023, 1024), np.float32)
    assert not workspace.cache.mappings


def test_threads_have_rooms_of_their_own():
    mine, theirs = workspace.empty(SHAPE, np.float32), []
    where = start(mine)
    del mine
    thread = threading.Thread(target=lambda: theirs.append(start(workspace.empty(SHAPE, np.float32))))
    thread.start()
    thread.join()
    assert theirs != [where]
    assert start(workspace.empty(SHAPE, np.float32)) == where


class Refusing:
    """In place of a mapping whose memory is locked."""

    def madvise(self, advice):
        raise OSError(22, "Invalid argument")


def test_memory_that_is_locked_is_kept():
    workspace.empty(SHAPE, np.float32)
    workspace.cache.mappings[0] = (workspace.cache.mappings[0][0], Refusing())
    workspace.release_unused()
    workspace.empty(SHAPE, np.float32)
    assert len(workspace.cache.mappings) == 1


def test_where_there_is_no_memory_numpy_says_so(monkeypatch):
    def none(*arguments, **keywords):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(workspace.mmap, "mmap", none)
    assert workspace.empty(SHAPE, np.float32).shape == SHAPE
    with pytest.raises(MemoryError, match="float32"):
        workspace.empty((2**30, 2**20), np.float32)
    assert not workspace.cache.mappings


def test_where_the_system_cannot_take_memory_back_none_is_kept(monkeypatch):
    monkeypatch.setattr(workspace, "FREE", None)
    workspace.empty(SHAPE, np.float32)
    workspace.release_unused()
    assert not workspace.cache.mappings


@pytest.mark.parametrize(
    ("optimizer", "settings"), [(rlx_optim.SOAP, {"precondition_frequency": 2}), (rlx_optim.KronPSGD, {}), (rlx_optim.Muon, {})]
)
def test_steps_take_no_more_rooms_than_the_first_few(optimizer, settings, monkeypatch):
    """And two threads at once end where one does."""
    monkeypatch.setattr(workspace, "LEAST", 2**12)
    monkeypatch.setattr(matrices, "STACKED", 1)  # one by one, as large ones are
    leave, used = workspace.release_unused, []

    def looked_at():
        used.append(
            sum(
                workspace._references(workspace.cache.mappings, i) != workspace.UNUSED
                for i in range(len(workspace.cache.mappings))
            )
        )
        leave()

    monkeypatch.setattr(workspace, "release_unused", looked_at)
    rng = np.random.default_rng(0)
    start, grads = ({name: rng.standard_normal((300, 270)).astype(np.float32) for name in "ab"} for _ in range(2))

    def run(params, counts):
        opt = optimizer(**settings)
        for _ in range(6):
            opt.step_all(params, grads)
            opt.end_iteration()
            counts.append(len(workspace.cache.mappings))

    runs = [({name: p.copy() for name, p in start.items()}, []) for _ in range(3)]
    run(*runs[0])
    assert 0 < runs[0][1][3] == runs[0][1][-1]
    assert used == [0] * 12  # the system may take all of it after each tensor
    threads = [threading.Thread(target=run, args=each) for each in runs[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for params, _ in runs[1:]:
        for name, p in params.items():
            np.testing.assert_array_equal(p, runs[0][0][name])

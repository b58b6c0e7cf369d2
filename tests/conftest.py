import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
# what XLA has compiled for a test before is not compiled again
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlx_optim/xla")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the tests of torch need the GPU's memory too
#: the files that take longest, compiling included; they go first, so that no process is left alone with one at the end
LONG = (
    "test_distributed",
    "test_triton",
    "test_optax_routing",
    "test_optax",
    "test_optax_transforms",
    "test_checkpoint_optax",
    "test_language",
    "test_torch_growth",
    "test_torch",
    "test_faults_soap",
    "test_docs",
    "test_own",
    "test_storage_torch",
    "test_sequences",
    "test_check",
    "test_race",
    "test_modifiers",
    "test_storage_optax",
    "test_engines",
    "test_rounding",
    "test_checkpoint_faults",
)


def pytest_configure(config):
    """Tell test files, and the processes that they start, whether slow tests are run."""
    if "not slow" not in config.option.markexpr:
        os.environ["SLOW_TESTS"] = "1"


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.fixture(scope="module")
def one_thread():
    """torch on one thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_width(monkeypatch):
    """The width of a terminal that whoever runs the tests has is none of theirs: where COLUMNS is set, error lines are folded."""
    monkeypatch.delenv("COLUMNS", raising=False)

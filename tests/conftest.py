"""What every test stands on."""

import pytest
import torch

from orca_kernels import compiled

pytest_plugins = ["tables"]

# Tiny tensors gain nothing from a second thread, and the suite runs in as many processes as there are cores.
torch.set_num_threads(1)
# Otherwise a test would run on them or not by what has run before it, and round differently.
compiled.library()


@pytest.fixture(autouse=True)
def _tiny_weights_are_packed_too(monkeypatch):
    """The packed path is the one that tests should go; by size alone no tiny model would."""
    monkeypatch.setattr("orca_hf.packed_linear._MIN_ELEMENTS", 1)


@pytest.fixture(autouse=True)
def _log_reaches_caplog(caplog):
    """The library's messages, without handlers of its own."""
    caplog.set_level("WARNING", logger="orca_hf")

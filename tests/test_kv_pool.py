"""Promises of the K/V pool: sized from free memory by the stated rule, shaped by what each layer really makes."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from orca_hf import CapacityError, OrcaConfig
from orca_hf.errors import UnsupportedError
from orca_hf.kv_pool import KVPool, choose_num_slots, free_memory

CPU = torch.device("cpu")
OTHER = torch.device("meta")

SIZES = [
    # settings, bytes a slot takes, longest request, slots
    ({"max_slots": 100}, {CPU: 10}, 10, 100),
    ({"max_slots": 100}, {CPU: 10**9}, None, 100),
    ({"memory_fraction": 0.25}, {CPU: 10}, None, 25_000),
    ({"memory_fraction": 0.5, "max_batch_size": 2}, {CPU: 10}, 100, 2 * 112),
    ({"memory_fraction": 0.5, "max_batch_size": 2, "block_size": 4}, {CPU: 10}, 100, 200),
    ({"memory_fraction": 0.5}, {CPU: 10, OTHER: 100}, None, 2_500),
]


@pytest.mark.parametrize(("settings", "needs", "longest", "expected"), SIZES)
def test_the_rule_for_the_number_of_slots(monkeypatch, settings, needs, longest, expected):
    monkeypatch.setattr("orca_hf.kv_pool.free_memory", lambda device: 1_000_000 if device == CPU else 500_000)
    assert choose_num_slots(OrcaConfig(**settings), needs, longest) == expected


def test_too_little_memory_names_the_device_and_the_bytes(monkeypatch):
    monkeypatch.setattr("orca_hf.kv_pool.free_memory", lambda device: 1_000_000 if device == CPU else 100)
    with pytest.raises(CapacityError, match=r"50% of the free memory of meta is 50 bytes.*takes 160"):
        choose_num_slots(OrcaConfig(), {CPU: 10, OTHER: 10}, None)


def test_free_memory_is_below_the_machines_total():
    import psutil

    assert 0 < free_memory(CPU) < psutil.virtual_memory().total


def test_a_containers_limit_counts(monkeypatch):
    monkeypatch.setattr("orca_hf.kv_pool._free_in_cgroup", lambda: 12_345)
    assert free_memory(CPU) == 12_345


def test_each_layer_gets_memory_of_its_own_shape_and_type():
    pool = KVPool(8)
    first, second = nn.Identity(), nn.Identity()
    wide = pool.layer(first, torch.zeros(1, 2, 4), torch.zeros(1, 2, 6))
    narrow = pool.layer(second, torch.zeros(1, 1, 4, dtype=torch.bfloat16), torch.zeros(1, 1, 4, dtype=torch.bfloat16))
    assert wide.key.shape == (8, 2, 4)
    assert wide.value.shape == (8, 2, 6)
    assert narrow.key.dtype == torch.bfloat16
    assert pool.layer(first, torch.zeros(3, 2, 4), torch.zeros(3, 2, 6)) is wide
    assert pool.bytes_per_slot() == {CPU: 2 * (4 + 6) * 4 + (4 + 4) * 2}
    assert pool.num_bytes == 8 * (80 + 16)


@pytest.mark.parametrize(
    "changed",
    [torch.zeros(1, 3, 4), torch.zeros(1, 2, 5), torch.zeros(1, 2, 4, dtype=torch.float16)],
    ids=["heads", "head_dim", "dtype"],
)
def test_a_layer_that_changes_its_mind_is_refused(changed):
    pool = KVPool(8)
    module = nn.Identity()
    pool.layer(module, torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
    with pytest.raises(UnsupportedError):
        pool.layer(module, changed, torch.zeros(1, 2, 4))


# Run in a process of its own, whose greatest memory is the pool's alone.
RESERVE = """
import resource, torch
from torch import nn
from orca_hf.kv_pool import KVPool

torch.use_deterministic_algorithms(True)
pool, layer = KVPool(2**20), nn.Identity()
state = torch.ones(1, 2, 64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
cache = pool.layer(layer, state, state)
cache.key[123_456] = state[0]
assert cache.key.shape == (2**20, 2, 64) and cache.key.is_contiguous() and torch.equal(cache.key[123_456], state[0])
print(pool.num_bytes, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ru_maxrss is in another unit")
def test_memory_that_no_token_has_is_not_touched_where_pytorch_fills_what_it_allocates():
    run = subprocess.run([sys.executable, "-c", RESERVE], capture_output=True, text=True, check=True)
    reserved, touched = map(int, run.stdout.split())
    assert reserved == 2**30
    assert touched < 2**26

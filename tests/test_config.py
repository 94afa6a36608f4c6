"""A bad setting is refused when it is given, with a message that names it; a good one stays as it is."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest

from orca_hf.config import OrcaConfig
from orca_hf.errors import ConfigError, OrcaError

BAD_SETTINGS: list[tuple[dict[str, Any], list[str]]] = [
    ({"max_batch_size": 0}, ["max_batch_size is 0", "integer of at least 1"]),
    ({"max_batch_size": -4}, ["max_batch_size is -4", "integer of at least 1"]),
    ({"max_batch_size": 8.0}, ["max_batch_size is 8.0", "integer"]),
    ({"max_batch_size": "8"}, ["max_batch_size is '8'", "integer"]),
    ({"max_batch_size": True}, ["max_batch_size is True", "integer"]),
    ({"max_batch_size": None}, ["max_batch_size is None", "integer"]),
    ({"max_batch_tokens": 0}, ["max_batch_tokens is 0", "integer of at least 1"]),
    ({"max_batch_tokens": 512.0}, ["max_batch_tokens is 512.0", "integer"]),
    ({"max_batch_tokens": True, "max_batch_size": 1}, ["max_batch_tokens is True", "integer"]),
    ({"max_batch_tokens": 31}, ["max_batch_tokens is 31", "max_batch_size 32", "Raise the first or lower the second"]),
    ({"max_batch_size": 513}, ["max_batch_tokens is 512", "max_batch_size 513"]),
    ({"max_slots": 0}, ["max_slots is 0", "integer of at least 16"]),
    ({"max_slots": 15}, ["max_slots is 15", "integer of at least 16"]),
    ({"max_slots": 63, "block_size": 64}, ["max_slots is 63", "integer of at least 64"]),
    ({"max_slots": 1024.5}, ["max_slots is 1024.5", "integer"]),
    ({"max_slots": True, "block_size": 1}, ["max_slots is True", "integer"]),
    ({"memory_fraction": 0}, ["memory_fraction is 0", "between 0 and 1"]),
    ({"memory_fraction": 1}, ["memory_fraction is 1", "between 0 and 1"]),
    ({"memory_fraction": -0.1}, ["memory_fraction is -0.1", "between 0 and 1"]),
    ({"memory_fraction": 50}, ["memory_fraction is 50", "between 0 and 1"]),
    ({"memory_fraction": math.nan}, ["memory_fraction is nan", "between 0 and 1"]),
    ({"memory_fraction": math.inf}, ["memory_fraction is inf", "between 0 and 1"]),
    ({"memory_fraction": "0.5"}, ["memory_fraction is '0.5'", "number"]),
    ({"memory_fraction": None}, ["memory_fraction is None", "number"]),
    ({"memory_fraction": True}, ["memory_fraction is True", "number"]),
    ({"block_size": 0}, ["block_size is 0", "integer of at least 1"]),
    ({"block_size": -16}, ["block_size is -16", "integer of at least 1"]),
    ({"block_size": 24}, ["block_size is 24", "power of two"]),
    ({"block_size": 16.0}, ["block_size is 16.0", "integer"]),
    ({"block_size": True}, ["block_size is True", "integer"]),
    ({"pack_weights": 1}, ["pack_weights is 1", "True or False"]),
    ({"pack_weights": "yes"}, ["pack_weights is 'yes'", "True or False"]),
    ({"pack_weights": None}, ["pack_weights is None", "True or False"]),
    ({"deterministic": None}, ["deterministic is None", "True or False"]),
    ({"num_speculative_tokens": -1}, ["num_speculative_tokens is -1", "integer of at least 0"]),
    ({"num_speculative_tokens": True}, ["num_speculative_tokens is True", "integer"]),
    ({"free_when_idle": 0}, ["free_when_idle is 0", "True or False"]),
    ({"cuda_graphs": "auto"}, ["cuda_graphs is 'auto'", "True or False"]),
]

FIELDS = [field.name for field in dataclasses.fields(OrcaConfig)]


@pytest.mark.parametrize(
    ("bad", "words"), BAD_SETTINGS, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_bad_setting_is_refused_by_name(bad: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        OrcaConfig(**bad)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "good",
    [
        {},
        {"max_batch_size": 1},
        {"max_batch_size": 512, "max_batch_tokens": 512},
        {"max_batch_size": 100_000, "max_batch_tokens": None},
        {"max_slots": 16},
        {"max_slots": 1, "block_size": 1},
        {"max_slots": 1000},
        {"block_size": 256},
        {"memory_fraction": 0.01},
        {"memory_fraction": 0.99},
        {"pack_weights": False, "free_when_idle": True},
    ],
    ids=str,
)
def test_good_setting_is_kept_and_leaves_the_others_at_their_defaults(good: dict[str, Any]) -> None:
    expected = {name: getattr(OrcaConfig(), name) for name in FIELDS} | good
    assert dataclasses.asdict(OrcaConfig(**good)) == expected


def test_defaults_are_the_documented_ones() -> None:
    assert dataclasses.asdict(OrcaConfig()) == {
        "max_batch_size": 32,
        "max_batch_tokens": 512,
        "max_slots": None,
        "memory_fraction": 0.5,
        "block_size": 16,
        "pack_weights": True,
        "deterministic": False,
        "num_speculative_tokens": None,
        "free_when_idle": False,
        "trust_modules": (),
        "cuda_graphs": False,
    }


def test_config_error_is_a_value_error_of_ours() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, OrcaError)


@pytest.mark.parametrize("name", FIELDS)
def test_settings_are_frozen(name: str) -> None:
    config = OrcaConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, getattr(config, name))


def test_replace_checks_again() -> None:
    config = OrcaConfig(max_batch_size=8, max_batch_tokens=8)
    assert dataclasses.replace(config, max_batch_tokens=9).max_batch_tokens == 9
    with pytest.raises(ConfigError, match="max_batch_tokens is 7, below max_batch_size 8"):
        dataclasses.replace(config, max_batch_tokens=7)


def test_settings_are_given_by_name() -> None:
    with pytest.raises(TypeError, match="positional"):
        OrcaConfig(32)  # type: ignore[misc]
    with pytest.raises(TypeError, match="max_bs"):
        OrcaConfig(max_bs=32)  # type: ignore[call-arg]


def test_configs_are_equal_by_value_through_copies_and_pickles() -> None:
    config = OrcaConfig(max_batch_size=8, max_slots=4096)
    assert config == OrcaConfig(max_batch_size=8, max_slots=4096)
    assert config != OrcaConfig(max_batch_size=8)
    assert hash(config) == hash(OrcaConfig(max_batch_size=8, max_slots=4096))
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config

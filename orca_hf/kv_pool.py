"""The K and V tensors of every layer, and how many slots they may have."""

import math
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from orca_hf.config import OrcaConfig
from orca_hf.errors import CapacityError, UnsupportedError


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's K/V memory.

    Attributes:
        key: (num_slots, num_kv_heads, head_dim).
        value: (num_slots, num_kv_heads, v_head_dim).
    """

    key: Tensor
    value: Tensor

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one token takes in this layer."""
        return sum(cache.element_size() * cache.shape[1] * cache.shape[2] for cache in (self.key, self.value))


class KVPool:
    """K/V memory of a model, a slot a token, made layer by layer as the first forward reaches each attention module.

    So every layer's memory has the shape, dtype and device of the K and V that the layer really makes: under a device
    map, under autocast, with a different number of heads in each layer. A module that attends several times in one
    forward has a memory for each.

    Args:
        num_slots: Tokens that fit.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._layers: dict[tuple[nn.Module, int], LayerCache] = {}

    def layer(self, module: nn.Module, key: Tensor, value: Tensor, call: int = 0) -> LayerCache:
        """The memory of attention module `module`, made on first use.

        Args:
            module: The attention module; stands for its layer.
            key: (total_q, num_kv_heads, head_dim): K as the module makes it.
            value: (total_q, num_kv_heads, v_head_dim): V likewise.
            call: How many times the module has attended in this forward before.

        Raises:
            UnsupportedError: The module's K or V changed shape, dtype or device since the memory was made.
        """
        found = self._layers.get((module, call))
        if found is None:
            try:
                found = self._layers[module, call] = LayerCache(
                    _reserve((self.num_slots, *key.shape[1:]), key), _reserve((self.num_slots, *value.shape[1:]), value)
                )
            except (RuntimeError, MemoryError) as error:  # torch's out-of-memory errors are RuntimeErrors
                self._layers.clear()
                raise UnsupportedError(f"{self.num_slots:,} K/V slots cannot be allocated: {error}") from error
        elif (
            found.key.dtype != key.dtype
            or found.value.dtype != value.dtype
            or found.key.device != key.device
            or found.key.shape[1:] != key.shape[1:]
            or found.value.shape[1:] != value.shape[1:]
        ):
            raise UnsupportedError(
                f"{type(module).__name__} now makes K of {tuple(key.shape[1:])} {key.dtype} on {key.device}, but its "
                f"K/V memory holds {tuple(found.key.shape[1:])} {found.key.dtype} on {found.key.device}"
            )
        return found

    def read(self, slots: Tensor) -> list[tuple[nn.Module, Tensor, Tensor]]:
        """For each layer its attention module, and copies of K and V in `slots` (num,): (num, num_kv_heads, dim)."""
        states = []
        for (module, _), layer in self._layers.items():
            index = slots.to(layer.key.device)
            states.append((module, layer.key[index], layer.value[index]))
        return states

    @property
    def layers(self) -> tuple[LayerCache, ...]:
        """The layers' memories, in order of their first use."""
        return tuple(self._layers.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of K/V memory reserved in all layers."""
        return self.num_slots * sum(layer.bytes_per_slot for layer in self._layers.values())

    def bytes_per_slot(self) -> dict[torch.device, int]:
        """Bytes that one token takes, by device."""
        needs: dict[torch.device, int] = {}
        for layer in self._layers.values():
            needs[layer.key.device] = needs.get(layer.key.device, 0) + layer.bytes_per_slot
        return needs


def _reserve(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Memory of that shape, of the dtype and device of `like`, that nobody has touched.

    No slot is read before it is written, and untouched pages cost no memory. PyTorch would fill a tensor that it makes
    where the user asks for deterministic algorithms, but never a storage.
    """
    storage = torch.UntypedStorage(math.prod(shape) * like.element_size(), device=like.device)
    return like.new_empty(0).set_(storage).view(shape)


def choose_num_slots(config: OrcaConfig, bytes_per_slot: dict[torch.device, int], max_request_len: int | None) -> int:
    """How many slots the pool gets: the rule that the README states.

    `config.max_slots` if it is given. Else as many as `memory_fraction` of the free memory holds, on the device that
    holds fewest, but no more than `max_batch_size` requests of the model's greatest length could use.

    Args:
        config: The settings.
        bytes_per_slot: What one token takes on each device.
        max_request_len: The model's greatest length in tokens, where it has one.

    Raises:
        CapacityError: Not even one block fits.
    """
    if config.max_slots is not None:
        return config.max_slots
    budgets = {device: int(free_memory(device) * config.memory_fraction) for device in bytes_per_slot}
    num_slots = min(budgets[device] // needed for device, needed in bytes_per_slot.items())
    if max_request_len is not None:
        num_slots = min(num_slots, config.max_batch_size * -(-max_request_len // config.block_size) * config.block_size)
    if num_slots < config.block_size:
        tight = min(budgets, key=lambda device: budgets[device] // bytes_per_slot[device])
        raise CapacityError(
            f"{config.memory_fraction:.0%} of the free memory of {tight} is {budgets[tight]:,} bytes, but one block of "
            f"{config.block_size} tokens takes {config.block_size * bytes_per_slot[tight]:,}; free memory, or set "
            "max_slots in OrcaConfig."
        )
    return num_slots


def free_memory(device: torch.device) -> int:
    """Bytes free on `device` now: never its total, for others live there too."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What PyTorch's allocator holds without using is as good as free to us.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(psutil.virtual_memory().available, _free_in_cgroup())


def _free_in_cgroup() -> int | float:
    """Bytes left under a container's limit (cgroup v2), which the machine's free memory says nothing about."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return float("inf")  # not a container, or not one that says
    return float("inf") if limit == "max" else max(int(limit) - used, 0)

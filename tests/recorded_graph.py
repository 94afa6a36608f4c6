"""What stands for a CUDA graph where there is no device: the operations below the model, recorded and done again."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

# What would wait for the device, or has a result whose size only the device knows: no capture survives it.
_WAITS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WAITS:
            raise RuntimeError(f"{func} is not permitted when a stream is capturing")
        result = func(*args, **(kwargs or {}))
        # The tensors are held, so that no two have the same id.
        self.operations.append((func, args, kwargs or {}, result))
        return result


class RecordedGraph:
    """Replays run none of the model's Python, so they see of an iteration what is in the captured tensors alone."""

    captured = replayed = 0  # by all of them

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @staticmethod
    def why_not(device: torch.device) -> str | None:
        return None

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        RecordedGraph.captured += 1
        recorder = _Recorder()
        with recorder:
            self._recorded = run()
        self._operations = recorder.operations
        self._output = self._recorded.clone()
        return self._output

    def replay(self) -> None:
        RecordedGraph.replayed += 1
        now: dict[int, Tensor] = {}

        def latest(value: Any) -> Any:
            return now.get(id(value), value) if isinstance(value, Tensor) else value

        for func, args, kwargs, before in self._operations:
            after = func(*tree_map(latest, args), **tree_map(latest, kwargs))
            olds, news = (each if isinstance(each, (tuple, list)) else [each] for each in (before, after))
            now.update((id(old), new) for old, new in zip(olds, news, strict=True) if isinstance(old, Tensor))
        self._output.copy_(now[id(self._recorded)])

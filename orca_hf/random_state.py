"""Random draws that follow PyTorch's default generator as native generate() would have used it."""

import threading

import torch
from torch import Tensor

# States of default generators that a running call has taken as its own, so that no two calls draw the same numbers.
_taken: list[Tensor] = []
_lock = threading.Lock()


class DefaultGenerator:
    """A private continuation of a device's default generator.

    A call takes the default generator's state when it starts and draws from there, so its tokens depend on the seed
    and not on who else draws meanwhile. When it ends, the default generator moves to where native generate() would
    have left it, unless someone has moved it in the meantime. A call that starts from a state that a running call has
    taken draws a fresh seed from the default generator instead.

    Args:
        device: The device whose default generator is followed.
        num_streams: 1 follows it number by number. More gives each row a stream of its own, seeded from it in turn.
    """

    def __init__(self, device: torch.device, num_streams: int = 1) -> None:
        self._default = _default_generator(device)
        self._closed = False
        first = torch.Generator(device)
        with _lock:
            self._start = self._default.get_state()
            self._follows = num_streams == 1 and not any(torch.equal(self._start, state) for state in _taken)
            if self._follows:
                _taken.append(self._start)
                first.set_state(self._start)
                self._streams = [first]
            else:
                seeds = torch.randint(2**62, (num_streams,), generator=self._default, device=device).tolist()
                self._streams = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def draw(self, probs: Tensor, stream: int = 0) -> Tensor:
        """(num_rows, vocab_size) probabilities to (num_rows,) tokens."""
        return torch.multinomial(probs, num_samples=1, generator=self._streams[stream]).squeeze(1)

    def close(self) -> None:
        """Leave the default generator as native generate() would have. May be called twice."""
        with _lock:
            if self._closed:
                return
            self._closed = True
            if self._follows:
                _taken[:] = [state for state in _taken if state is not self._start]
                if torch.equal(self._default.get_state(), self._start):
                    self._default.set_state(self._streams[0].get_state())


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.init()
        return torch.cuda.default_generators[index]
    return torch.default_generator

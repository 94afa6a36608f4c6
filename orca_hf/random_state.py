"""Random draws that follow PyTorch's default generator as native generate() would have used it."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from orca_hf import multinomial

_NUM_SEEDS = 2**62
# By thread, the state of a default generator that its running call has taken as its own, so that no two calls draw the
# same numbers.
_taken: dict[int, Tensor] = {}
_lock = threading.RLock()  # a user's code, which may draw in turn, runs under it
LOCKS = (_lock,)
_seed: ContextVar[int | None] = ContextVar("orca_seed", default=None)
if hasattr(os, "register_at_fork"):
    # Held over a fork, so that no child finds it taken by a thread that it does not have; nor do calls of such go on.
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
    os.register_at_fork(after_in_child=_taken.clear)


def leave() -> None:
    """The calling thread's call is over, and the state that it has taken may be another's."""
    _taken.pop(threading.get_ident(), None)


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Let this thread's calls draw from streams of this seed, and leave the default generator alone."""
    token = _seed.set(seed)
    try:
        yield
    finally:
        _seed.reset(token)


def draw_seed(device: torch.device) -> int:
    """A seed from the default generator of `device`, which moves on."""
    generator = _default_generator(device)
    return int(torch.randint(_NUM_SEEDS, (), generator=generator, dtype=torch.int64, device=device))


@contextmanager
def reseeded(seed: int) -> Iterator[None]:
    """Let the default generators be as after `torch.manual_seed(seed)` within the block, and as they were after it."""
    with _lock, torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


@contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """Leave the default generators of the CPU and of `device` after the block as they were before it."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(_default_generator(device))
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            if not torch.equal(generator.get_state(), state):
                generator.set_state(state)


class DefaultGenerator:
    """A private continuation of a device's default generator.

    A call takes the default generator's state when it starts and draws from there, so its tokens depend on the seed
    and not on who else draws meanwhile. When it ends, the default generator moves to where native generate() would
    have left it, unless someone has moved it in the meantime. A call that starts from a state that a running call has
    taken draws a fresh seed from the default generator instead.

    Args:
        device: The device whose default generator is followed.
        num_streams: 1 follows it number by number. More gives each row a stream of its own, seeded from it in turn.
        shared: Draw from the default generator itself, since code of the user's may draw from it in between.
        seed: Follow the default generator as it would be after `torch.manual_seed(seed)`, in one stream, and leave the
            real one alone.
    """

    def __init__(
        self, device: torch.device, num_streams: int = 1, *, shared: bool = False, seed: int | None = None
    ) -> None:
        self._default = _default_generator(device)
        self._closed = False
        self._shared = shared
        self._own = seed is not None
        self._outside: Tensor | None = None  # the default generator's state while a stream is in its place
        of_thread = _seed.get()
        with _lock:
            self._start = self._default.get_state()
            self._follows = (
                not shared
                and seed is None
                and of_thread is None
                and num_streams == 1
                and not any(torch.equal(self._start, state) for state in _taken.values())
            )
            if seed is not None:
                self._streams = [torch.Generator(device).manual_seed(seed)]
            elif shared:
                self._streams = [self._default]
            elif self._follows:
                _taken[threading.get_ident()] = self._start
                self._streams = [torch.Generator(device)]
                self._streams[0].set_state(self._start)
            else:
                source = self._default if of_thread is None else torch.Generator(device).manual_seed(of_thread)
                seeds = torch.randint(
                    _NUM_SEEDS, (num_streams,), generator=source, dtype=torch.int64, device=device
                ).tolist()
                self._streams = [torch.Generator(device).manual_seed(each) for each in seeds]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let a seeded stream stand for the default generator, for code of the user's that may draw from that."""
        if not (self._own and self._shared):
            yield
            return
        stream = self._streams[0]
        with _lock:
            self._outside = self._default.get_state()
            self._default.set_state(stream.get_state())
            self._streams = [self._default]
            try:
                yield
            finally:
                stream.set_state(self._default.get_state())
                self._streams = [stream]
                self._default.set_state(self._outside)
                self._outside = None

    def draw(self, probs: Tensor, stream: int = 0) -> Tensor:
        """(num_rows, vocab_size) probabilities to (num_rows,) tokens."""
        return multinomial.draw(probs, self._streams[stream])

    def close(self, *, discard: bool = False) -> None:
        """Leave the default generator as native generate() would have. May be called twice.

        Args:
            discard: Leave it as it was at the start instead: the draws count for nothing.
        """
        with _lock:
            if self._outside is not None:  # `in_place` was interrupted
                self._default.set_state(self._outside)
            self._outside = None
            if self._closed:
                return
            if self._shared and discard and not self._own:
                self._default.set_state(self._start)
            if self._follows:
                if not discard and torch.equal(self._default.get_state(), self._start):
                    self._default.set_state(self._streams[0].get_state())
                leave()
            self._closed = True


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.init()
        return torch.cuda.default_generators[index]
    return torch.default_generator

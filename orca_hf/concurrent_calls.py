"""Running a wrapped model on many inputs from threads, which share its batch, with the outputs in order."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from orca_hf.errors import OrcaError
from orca_hf.openmp import release_threads
from orca_hf.random_state import draw_seed, seeded


class ConcurrentCalls:
    """Runs the model on each of many inputs, from threads; gives the outputs in the inputs' order.

    Args:
        inputs: What the calls get. Taken from in the thread that iterates, `look_ahead` at most before the output of
            the first is asked for.
        forward: A call.
        params: Its keyword arguments.
        num_threads: Calls at the same time.
        look_ahead: Inputs taken whose outputs have not been given.
        device: Where the model is.
        sampled: Whether the calls draw random numbers: each then gets a stream of its own, seeded in the inputs' order.
    """

    def __init__(
        self,
        inputs: Iterable[Any],
        forward: Callable[..., Any],
        params: dict[str, Any],
        *,
        num_threads: int,
        look_ahead: int,
        device: torch.device,
        sampled: bool,
    ) -> None:
        self._inputs = inputs
        self._forward = forward
        self._params = params
        self._num_threads = num_threads
        self._look_ahead = look_ahead
        self._device = device
        self._sampled = sampled

    def __iter__(self) -> Generator[Any, None, None]:
        stopper = _Stopper()
        settings = _ThreadSettings.of_this_thread(self._device.type)
        pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="orca-pipeline")
        window: deque[Future[Any]] = deque()
        inputs: Iterator[Any] | None = iter(self._inputs)

        def call(item: Any, seed: int | None) -> Any:
            with settings.entered(), seeded(seed):
                return self._forward(item, streamer=stopper, **self._params)

        if self._device.type == "cpu":
            release_threads()  # this thread will only wait, and the threads that compute want the cores
        try:
            while True:
                while inputs is not None and len(window) < self._look_ahead:
                    try:
                        item = next(inputs)
                        window.append(pool.submit(call, item, self._next_seed()))
                    except StopIteration:
                        inputs = None
                    except Exception as error:  # noqa: BLE001 - the caller's generator or tokenizer may raise anything
                        # It is raised again in its turn, after the results before it.
                        window.append(_failed(error))
                        inputs = None
                    if window and window[0].done():
                        break  # a slow generator does not hold back a result that is there
                if not window:
                    return
                yield window.popleft().result()
        finally:
            stopper.stop()
            pool.shutdown(cancel_futures=True)

    def _next_seed(self) -> int | None:
        return draw_seed(self._device) if self._sampled else None


def _failed(error: Exception) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


class _NoLongerWantedError(OrcaError):
    """Ends a call whose result nobody will look at. It stays in the call's future."""


class _Stopper(BaseStreamer):
    """A streamer that ends the calls that feed it.

    A streamer is the one thing that both the engine and native generate() turn to at every token, and that costs
    nothing worth the name.
    """

    def __init__(self) -> None:
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def put(self, value: torch.Tensor) -> None:
        if self._stopped.is_set():
            raise _NoLongerWantedError("The results of this pipeline call are no longer wanted.")

    def end(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _ThreadSettings:
    """PyTorch settings that belong to a thread, and that a call made elsewhere would otherwise lose."""

    device_type: str
    default_device: torch.device
    inference_mode: bool
    autocast_dtype: torch.dtype | None
    autocast_cache: bool

    @classmethod
    def of_this_thread(cls, device_type: str) -> "_ThreadSettings":
        autocast = torch.is_autocast_enabled(device_type)
        return cls(
            device_type=device_type,
            default_device=torch.get_default_device(),
            inference_mode=torch.is_inference_mode_enabled(),
            autocast_dtype=torch.get_autocast_dtype(device_type) if autocast else None,
            autocast_cache=torch.is_autocast_cache_enabled(),
        )

    def entered(self) -> ExitStack:
        stack = ExitStack()
        if self.default_device != torch.get_default_device():
            stack.enter_context(self.default_device)
        if self.inference_mode:
            stack.enter_context(torch.inference_mode())
        if self.autocast_dtype is not None:
            stack.enter_context(
                torch.autocast(self.device_type, dtype=self.autocast_dtype, cache_enabled=self.autocast_cache)
            )
        return stack

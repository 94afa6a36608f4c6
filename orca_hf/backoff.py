"""Smaller iterations after one ran out of memory, and larger ones again when they have gone well."""

from orca_hf.scheduler import Iteration, Scheduler

_CALM = 16  # iterations that must go well before the next are twice as large


class Backoff:
    """Bounds a scheduler's iterations below what its settings allow, for as long as memory is short.

    Args:
        scheduler: The scheduler; its bounds are what they become again.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._max_batch_size = scheduler.max_batch_size
        self._max_batch_tokens = scheduler.max_batch_tokens
        self._num_calm = 0

    def shrink(self, iteration: Iteration) -> bool:
        """Halve what the next iterations may hold, after `iteration` ran out of memory: requests first, then tokens.

        Returns:
            Whether there was anything to halve: a single request's single token, or whole prompt, is its own fault.
        """
        scheduler = self._scheduler
        self._num_calm = 0
        if len(iteration.steps) > 1:
            scheduler.max_batch_size = len(iteration.steps) // 2
        elif iteration.num_tokens > 1 and scheduler.max_batch_tokens is not None:
            scheduler.max_batch_size = 1
            scheduler.max_batch_tokens = iteration.num_tokens // 2
        else:
            return False
        return True

    def went_well(self) -> None:
        """An iteration ran to its end."""
        scheduler = self._scheduler
        if scheduler.max_batch_size == self._max_batch_size and scheduler.max_batch_tokens == self._max_batch_tokens:
            return
        self._num_calm += 1
        if self._num_calm < _CALM:
            return
        self._num_calm = 0
        scheduler.max_batch_size = min(self._max_batch_size, 2 * scheduler.max_batch_size)
        if scheduler.max_batch_tokens is not None and self._max_batch_tokens is not None:
            scheduler.max_batch_tokens = min(
                self._max_batch_tokens, max(2 * scheduler.max_batch_tokens, scheduler.max_batch_size)
            )

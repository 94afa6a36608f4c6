"""What can go wrong, as types. Each message says what was given, what is allowed and what to do."""


class OrcaError(Exception):
    """Base of every error that orca_hf raises on its own account."""


class ConfigError(OrcaError, ValueError):
    """A setting that cannot be: out of range, or two that contradict each other."""


class CapacityError(OrcaError, ValueError):
    """A request that could never get its K/V slots, however long it waited."""


class RequestError(OrcaError, ValueError):
    """A request that is malformed: an empty prompt, a limit below one token."""


class TokenIdError(OrcaError, IndexError):
    """A prompt token outside the model's vocabulary (native generate() raises IndexError too)."""


class ModelError(OrcaError, TypeError):
    """An object that is not a causal language model, or not one that can be wrapped."""


class CheckpointError(OrcaError, OSError):
    """A checkpoint that is missing, unsafe, truncated or does not fit the model."""


class UnsupportedError(OrcaError):
    """A model asked the attention function for something it does not do.

    Raised inside a forward; `generate()` answers it by running natively, with this text as the reason.
    """


class CancelledError(OrcaError):
    """A submitted request that was cancelled, or that nobody wanted any more."""


class DeadlineError(OrcaError):
    """A submitted request whose deadline passed before its end. Not a TimeoutError: waiting longer will not help."""


class ForwardError(OrcaError):
    """A forward of the model failed while a submitted request was in it; `__cause__` is what the model raised."""


class StoppedError(OrcaError):
    """An engine that takes no requests: it was told to stop, or its thread has died."""


class OutputError(OrcaError):
    """A program's standard output that takes nothing more."""

"""The settings of one wrapped model."""

from dataclasses import dataclass

from orca_hf.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class OrcaConfig:
    """How a wrapped model schedules its requests and how much memory it may take.

    Attributes:
        max_batch_size: Most requests in one iteration (`max_bs` in the Orca paper).
        max_batch_tokens: Most tokens in one iteration. Longer prompts are computed in chunks, beside the decodes of
            the running requests. `None` runs every prompt whole, as in the paper. At least `max_batch_size`.
        max_slots: K/V memory in tokens (`n_slots` in the paper). `None` derives it from `memory_fraction`.
        memory_fraction: Share of the memory that is *free* when the pool is made that it may take, in (0, 1).
            Ignored when `max_slots` is given.
        block_size: Tokens in a K/V block, a power of two.
        pack_weights: Keep a copy of the linear weights in the layout that the CPU's matrix product likes best. Faster
            by up to two times, at the cost of that copy; without effect on other devices.
        deterministic: What a request computes does not depend, to the last bit and in any dtype, on who shares its
            iterations, nor on `max_batch_size` and `max_batch_tokens`. Slower; see the README.
        num_speculative_tokens: Guesses at a request's next tokens that an iteration may compute along, taken from where
            its last tokens stood before. They change no token. `None` guesses where it pays: on packed weights, while
            few requests run; a number guesses as many always, and 0 never.
        free_when_idle: Give the K/V memory and packed weights back whenever the last running request is done. Slower
            for many small calls; for a process that trains in between.
        trust_modules: Names of Python modules and packages, such as ("my_project", "__main__"), whose code may run
            inside the model by Orca: it treats each token by itself, and writes no weights. A model whose modules or
            patches come from elsewhere than known libraries goes native without that.
        cuda_graphs: Replay iterations in which every request computes one token from CUDA graphs, captured over the
            model's own modules. Not yet run on a device, hence off; without effect on other devices.
    """

    max_batch_size: int = 32
    max_batch_tokens: int | None = 512
    max_slots: int | None = None
    memory_fraction: float = 0.5
    block_size: int = 16
    pack_weights: bool = True
    deterministic: bool = False
    num_speculative_tokens: int | None = None
    free_when_idle: bool = False
    trust_modules: tuple[str, ...] = ()
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        self._require_int("max_batch_size", self.max_batch_size, at_least=1)
        self._require_int("block_size", self.block_size, at_least=1)
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size is {self.block_size}, but must be a power of two (16 is usual).")
        if self.max_batch_tokens is not None:
            self._require_int("max_batch_tokens", self.max_batch_tokens, at_least=1)
            if self.max_batch_tokens < self.max_batch_size:
                raise ConfigError(
                    f"max_batch_tokens is {self.max_batch_tokens}, below max_batch_size {self.max_batch_size}: each "
                    "request in an iteration computes at least one token. Raise the first or lower the second."
                )
        if self.max_slots is not None:
            self._require_int("max_slots", self.max_slots, at_least=self.block_size)
        if self.num_speculative_tokens is not None:
            self._require_int("num_speculative_tokens", self.num_speculative_tokens, at_least=0)
        fraction = self.memory_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
            raise ConfigError(f"memory_fraction is {fraction!r}, but must be a number between 0 and 1, both excluded.")
        trusted = self.trust_modules
        if not isinstance(trusted, tuple) or not all(isinstance(name, str) and name for name in trusted):
            raise ConfigError(
                f"trust_modules is {trusted!r}, but must be a tuple of Python modules' names, such as ('my_project',)."
            )
        for name in ("pack_weights", "deterministic", "free_when_idle", "cuda_graphs"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}, but must be True or False.")

    @staticmethod
    def _require_int(name: str, value: object, *, at_least: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise ConfigError(f"{name} is {value!r}, but must be an integer of at least {at_least}.")

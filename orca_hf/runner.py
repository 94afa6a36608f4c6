"""The model runner: an Iteration in, the logits of its sampling rows out."""

import inspect
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from orca_hf import random_state
from orca_hf.adapters import adapt, native_kv
from orca_hf.attention_context import AttentionContext, attention_context, leave_iteration
from orca_hf.attention_sources import attention_functions, mode_reasons
from orca_hf.batch import ForwardBatch, build_batch
from orca_hf.batch_invariance import ROWS, BatchInvariantProducts, leave_batch_invariance
from orca_hf.config import OrcaConfig
from orca_hf.decode_graphs import CudaGraph, DecodeGraphs, Graph
from orca_hf.errors import UnsupportedError
from orca_hf.kv_pool import KVPool, choose_num_slots, free_memory
from orca_hf.openmp import release_threads
from orca_hf.packed_weights import PackedWeights
from orca_hf.patches import (
    IterationPatches,
    StandIn,
    all_modules,
    attention_configs,
    forget_lock,
    model_lock,
    patching_locks,
)
from orca_hf.request import Request
from orca_hf.scheduler import Iteration, Step

if TYPE_CHECKING:
    from orca_hf.interruption import Lock

# An output's field for the K/V states; transformers renamed it on its way through version 5.
CACHE_FIELD = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"

# What makes packed weights pay, measured on SmolLM2-135M: packing them takes as long as they save in some sixteen
# iterations; comparing them with the model's, once whenever work begins, as long as they save in one or two of one row,
# or in one of a few.
_PACK_FOR = 16
_VERIFY_FOR = 4
_VERIFY_FOR_ROWS = 4
_WORTH_RELEASING_S = 0.02
# Requests whose next token is computed twice to check fused forwards.
_CHECKED_WITH = 4
# Model types that use transformers' attention interface and do not say so.
_UNSAID = frozenset({"biogpt", "stablelm"})


class ThreadModes(NamedTuple):
    """Modes of a thread that an iteration changes."""

    is_grad_enabled: bool
    device_type: str | None
    is_autocast_enabled: bool

    def restore(self) -> None:
        """Set the calling thread's modes to these."""
        if torch.is_grad_enabled() != self.is_grad_enabled:
            torch.set_grad_enabled(self.is_grad_enabled)
        if self.device_type is not None and torch.is_autocast_enabled(self.device_type) != self.is_autocast_enabled:
            torch.set_autocast_enabled(self.device_type, self.is_autocast_enabled)


class ModelRunner:
    """Runs iterations of one model on one K/V pool.

    Args:
        model: The user's model; changed only while an iteration runs.
        config: The settings.
        autocast: Autocast to run under, as (device type, dtype), or None.

    Attributes:
        accepts: The arguments of the model's forward.
        adapted: The model's attention modules that run by an adapter.
        calls: How often each attention module runs in a forward; None before the trial.
        windows: The windows of the attention modules, as `AttentionContext` has them; None before the trial.
        has_native_cache: Whether the pool holds what the model's native cache would, which may be latents, or heads
            before they are repeated, or nothing for layers that share. The trial finds out.
        graphs: CUDA graphs of decode iterations; None where nobody asked for them, and before the pool is made.
    """

    graph_type: type[Graph] = CudaGraph  # a test, without a device, has another

    def __init__(
        self,
        model: PreTrainedModel,
        config: OrcaConfig,
        autocast: tuple[str, torch.dtype] | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.autocast = autocast
        self.pool = KVPool(0)
        self.packed = PackedWeights(batch_invariant=config.deterministic)
        self.graphs: DecodeGraphs | None = None
        self.has_native_cache = False
        self.calls: dict[nn.Module, int] | None = None
        self.windows: set[tuple[nn.Module, int | None]] | None = None
        self._bytes_per_slot: dict[torch.device, int] = {}
        modules = all_modules(model)
        # Where a model is on the attention interface, its attention may be that of an adapted class too, by heritage.
        self.adapted = [] if uses_interface(model) else adapt(modules)
        self._tables: dict[Any, Tensor] | None = {} if self.adapted else None
        self._patches = IterationPatches(attention_configs(modules))
        self._structure = model_structure(modules)
        self.accepts = frozenset(inspect.signature(type(model).forward).parameters)
        self._iterations = 0
        # How often someone came for whom packed weights must be compared with the model's, and as of which they were.
        self._wanted = 1
        self._verified = 0
        self._packing = False  # while packed weights are changed
        self._packs: bool | None = None  # whether it always runs packed, once that is decided
        self._starting = False  # the next iteration is the first since `start`
        self._busy_s = 0.0  # time in forwards since a thread began to drive

    @property
    def vocab_size(self) -> int:
        """Token ids that the model has an embedding for."""
        return _embedding(self.model).shape[0]

    @property
    def has_cheap_rows(self) -> bool:
        """Whether a few more rows in an iteration of few cost next to nothing: where products read packed weights."""
        return bool(self.packed.forwards) and self.graphs is None

    @property
    def locks(self) -> "tuple[Lock, ...]":
        """Every lock that a thread takes to run iterations."""
        return (*patching_locks(self.model), *random_state.LOCKS)

    def is_stale(self, modules: tuple[nn.Module, ...]) -> bool:
        """Whether the model, now of these `modules`, is no longer what this runner was made for."""
        return self._structure != model_structure(modules)

    def make_pool(self) -> int:
        """Make the pool, as large as the memory that is free now allows.

        Returns:
            The pool's number of slots.

        Raises:
            CapacityError: There is not enough free memory for one block.
        """
        if self.pool.layers:
            self._bytes_per_slot = self.pool.bytes_per_slot()
        num_slots = choose_num_slots(self.config, self._bytes_per_slot, max_positions(self.model))
        self.pool = KVPool(num_slots)
        if self.config.cuda_graphs:
            self._make_graphs(num_slots)
        return num_slots

    def _make_graphs(self, num_slots: int) -> None:
        block_size = self.config.block_size
        spare_block = -(-num_slots // block_size)
        self.pool = KVPool((spare_block + 1) * block_size)
        self.graphs = DecodeGraphs(
            self.graph_type,
            self.model,
            device=self.input_device,
            block_size=block_size,
            spare_block=spare_block,
            given_up=self._why_no_graphs() if self.graphs is None else self.graphs.given_up,
        )

    def _why_no_graphs(self) -> str | None:
        device = self.input_device
        if reason := self.graph_type.why_not(device):
            return reason
        if self._bytes_per_slot.keys() != {device}:
            return "the model is on several devices"
        if self.config.deterministic:
            return "deterministic=True cuts products into pieces"
        if self.autocast is not None:
            return "the model is called under autocast"
        kinds = {type(parameter) for parameter in self.model.parameters()} - {nn.Parameter}
        return f"the address of a {kinds.pop().__name__} says nothing about its weights" if kinds else None

    def read_kv(self, requests: Sequence[Request], length: int) -> list[tuple[Tensor, Tensor]]:
        """Copies of the computed K/V of `requests`, aligned at their ends, zeros before their starts.

        Args:
            requests: They hold their slots.
            length: Tokens of each row as its caller sees it, padding included.

        Returns:
            For each layer K and V of (num_requests, num_kv_heads, length, head_dim).
        """
        block_size = self.config.block_size
        states: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in self.pool.layers]
        for request in requests:
            positions = range(request.computed)
            places = [request.blocks[p // block_size] * block_size + p % block_size for p in positions]
            slots = torch.tensor(places, dtype=torch.int64, device="cpu")
            for (keys, values), (module, key, value) in zip(states, self.pool.read(slots), strict=True):
                if self.adapted:
                    key, value = native_kv(module, key, value)
                missing = (0, 0, 0, 0, length - request.computed, 0)
                keys.append(torch.nn.functional.pad(key, missing).transpose(0, 1))
                values.append(torch.nn.functional.pad(value, missing).transpose(0, 1))
        return [(torch.stack(keys), torch.stack(values)) for keys, values in states]

    def start(self) -> None:
        """Called when work begins after an idle time, in which the user may have changed the weights."""
        self.distrust()
        self._starting = True
        if self.graphs is not None:
            self.graphs.start()

    def distrust(self) -> None:
        """Have the packed weights compared with the model's, bit by bit, before another iteration runs on them.

        For whoever joins while others run, and after code of a user's has run: both may have changed the weights.
        """
        self._wanted += 1

    def thread_modes(self) -> ThreadModes:
        """The modes of the calling thread that iterations change, for `restore`."""
        device = self.input_device.type
        if device == "meta":
            return ThreadModes(torch.is_grad_enabled(), None, False)
        return ThreadModes(torch.is_grad_enabled(), device, torch.is_autocast_enabled(device))

    def restore(self, modes: ThreadModes) -> None:
        """Undo what an iteration of this thread has left where an interruption cut it off; may be called again."""
        leave_iteration()
        leave_batch_invariance()
        self._patches.undo()
        modes.restore()

    def take_over(self) -> None:
        """Undo what an iteration of a thread has left that will never undo it itself."""
        forget_lock(self.model)
        self._patches.undo()

    def leave_cores(self) -> None:
        """Called by a thread that stops driving: the next driver will want the cores to itself."""
        # Below some milliseconds of work, giving the threads back would cost more than it can bring.
        if self._busy_s > _WORTH_RELEASING_S and self.input_device.type == "cpu":
            release_threads()
        self._busy_s = 0.0

    def release(self) -> None:
        """Give back the K/V memory and the packed weights; both are made again when needed."""
        self.pool = KVPool(self.pool.num_slots)
        self.packed.clear()
        if self.graphs is not None:
            self.graphs.clear()

    @staticmethod
    def ran_out_of_memory(error: Exception) -> bool:
        """Whether a forward failed for want of memory alone; what PyTorch's allocators keep unused is then free."""
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
            return True
        return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)

    def run(self, iteration: Iteration, remaining: int = 0) -> Tensor:
        """One forward of the model over an iteration.

        Args:
            iteration: What to compute; its K/V are written to the pool.
            remaining: Iterations that will certainly follow, to judge whether packing the weights will pay.

        Returns:
            (num_sampling, vocab_size) logits in the model's dtype: the rows that the steps want, in order.

        Raises:
            UnsupportedError: The model asked attention for something that is not built.
        """

        def plain() -> Tensor:
            packed = self._packed_forwards(iteration.num_tokens, remaining)
            if self.packed.is_new:
                # Fused forwards hold themselves against the modules' own at their first call, better a small one.
                first = (Step(step.request, step.start, 1, samples=False) for step in iteration.steps[:_CHECKED_WITH])
                self.forward(Iteration(tuple(first)), packed)
                self.packed.is_new = False
            return self.forward(iteration, packed)[0]

        if self.graphs is None:
            return plain()
        with torch.inference_mode(False), torch.no_grad():  # the graphs' buffers outlive the caller's mode
            return self.graphs.run(iteration, plain, lambda batch: self._compute(batch, [])[0])

    def forward(self, iteration: Iteration, packed: list[StandIn]) -> tuple[Tensor, AttentionContext]:
        """`run` with the given packed linears; also returns the iteration as the attention modules saw it."""
        batch = build_batch(
            iteration,
            block_size=self.config.block_size,
            device=self.input_device,
            pad_to=ROWS if self.config.deterministic else 1,
        )
        logits, context = self._compute(batch, packed)
        return logits[: max(1, sum(step.num_samples for step in iteration.steps))], context

    def _compute(self, batch: ForwardBatch, packed: list[StandIn]) -> tuple[Tensor, AttentionContext]:
        """The logits of a batch's sampling rows, and the batch as the attention modules saw it."""
        deterministic = self.config.deterministic
        context = AttentionContext(
            self.pool,
            batch.ragged,
            num_rows=batch.input_ids.shape[1],
            batch_invariant=deterministic,
            tables=self._tables,
        )
        arguments: dict[str, Any] = {
            "input_ids": batch.input_ids,
            "position_ids": batch.position_ids,
            "attention_mask": batch.attention_mask,
            "use_cache": False,
            "logits_to_keep": batch.sampling_rows,
            "return_dict": True,
        }
        accepted = {name: value for name, value in arguments.items() if name in self.accepts}
        with (
            model_lock(self.model),
            torch.inference_mode(False),
            torch.no_grad(),
            self.autocast_mode(batch.input_ids.device.type),
            self._patched([*self.adapted, *packed]),
            attention_context(context),
            BatchInvariantProducts() if deterministic else nullcontext(),
        ):
            began = time.perf_counter()
            logits = self.model(**accepted).logits[0]
            self._busy_s += time.perf_counter() - began
        context.check()
        if self.calls is not None and context.calls != self.calls:
            # A layer's K/V memory that was left out in one iteration would be read in the next.
            raise UnsupportedError("its attention modules run now more, now fewer times in a forward")
        if self.windows is not None and context.windows != self.windows:
            raise UnsupportedError("its attention modules look back over other numbers of tokens than in their trial")
        self._iterations += 1
        if len(logits) != len(batch.sampling_rows):  # a forward that cannot be told, or does not listen
            logits = logits[batch.sampling_rows.to(logits.device)]
        return logits, context

    @contextmanager
    def _patched(self, stand_ins: list[StandIn]) -> Iterator[None]:
        try:
            self._patches.apply(stand_ins)
            yield
        finally:
            self._patches.undo()

    @property
    def _is_verified(self) -> bool:
        return self._verified == self._wanted

    def _packed_forwards(self, num_rows: int, remaining: int) -> list[StandIn]:
        """The linears to run packed: all that can be, or none where that would not pay."""
        # A mode of the user's is to see every operation.
        if not self.config.pack_weights or self.autocast is not None or mode_reasons():
            return []
        if self._packing:  # an interruption came in the middle of what follows
            self.packed.clear()
        self._packing = True
        forwards = self._refreshed(num_rows, remaining)
        self._packing = False
        return forwards

    def _refreshed(self, num_rows: int, remaining: int) -> list[StandIn]:
        wanted = self._wanted  # whoever comes from here on wants another look
        if self._is_verified:
            self.packed.refresh(deep=False)
        # Packed products add in another order: what must always be the same is packed from the start, or never.
        elif self.config.deterministic or self._is_worth_verifying(num_rows, remaining):
            self.packed.refresh(deep=True)
            if self._packs is not False:
                self.packed.pack(self.model.modules(), max_bytes=self._packing_limit)
            if self.config.deterministic:
                self._packs = bool(self.packed.forwards)
            self._verified = wanted
        else:
            return []
        return self.packed.forwards

    def _is_worth_verifying(self, num_rows: int, remaining: int) -> bool:
        """Whether the packed weights, made now or compared with the model's, save that time again."""
        starting, self._starting = self._starting, False
        # Whoever has run that long without will go on: one call of a token or two after the other, for instance.
        if (self.packed.forwards or self._iterations >= _PACK_FOR) and num_rows >= _VERIFY_FOR_ROWS:
            return True
        # What ends at once, by EOS for instance, is not to pay for what others would gain by.
        return not starting and remaining >= (_VERIFY_FOR if self.packed.forwards else _PACK_FOR - self._iterations)

    def _packing_limit(self) -> int:
        if self._packs:
            return sys.maxsize
        return int(free_memory(torch.device("cpu")) * self.config.memory_fraction)

    @property
    def input_device(self) -> torch.device:
        """Where the model takes its tokens."""
        return input_device(self.model)

    def autocast_mode(self, device_type: str) -> AbstractContextManager[object]:
        """The autocast of this runner's calls, whatever that of the thread which drives."""
        if self.autocast is not None:
            return torch.autocast(device_type, dtype=self.autocast[1])
        return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def uses_interface(model: PreTrainedModel) -> bool:
    """Whether the model says that its attention goes through transformers' attention interface."""
    return bool(getattr(model, "_supports_attention_backend", False)) or model.config.model_type in _UNSAID


def max_positions(model: PreTrainedModel) -> int | None:
    """Tokens that a row of the model may have, None if it sets no limit."""
    config = model.config.get_text_config()
    limits = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    return min((limit for limit in limits if limit is not None), default=None)


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a forward wants its tokens: with the embedding, or where accelerate brings an offloaded embedding to."""
    device = _embedding(model).device
    if device.type != "meta":
        return device
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):
        if (execution_device := getattr(part, "execution_device", None)) is not None:
            return torch.device(execution_device)
    return device


def dummy_layers(cache: Any) -> frozenset[int]:
    """Layers for which a native cache keeps nothing, because they read another's K/V."""
    return frozenset(index for index, is_dummy in enumerate(getattr(cache, "is_dummy", ())) if is_dummy)


def _embedding(model: PreTrainedModel) -> Tensor:
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight


def model_structure(modules: tuple[nn.Module, ...]) -> tuple[Any, ...]:
    """What a runner takes for granted: modules, configs, attention, the parameters' classes, dtypes and devices."""
    configs = attention_configs(modules)
    names = tuple(config._attn_implementation for config in configs)
    values = [_frozen({**config.__dict__, "_attn_implementation_internal": None}) for config in configs]
    parameters = [parameter for module in modules for parameter in module._parameters.values() if parameter is not None]
    # The class too: a tensor subclass, as quantisation puts in a parameter's place, computes what it likes.
    kinds = [(type(parameter), parameter.dtype, parameter.device) for parameter in parameters]
    return tuple(map(id, modules)), names, values, attention_functions(modules), kinds


def _frozen(value: Any) -> Any:
    """A config's value, to compare with what it is later: a copy, so that a change within a list shows."""
    if isinstance(value, dict):
        return tuple((name, _frozen(each)) for name, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    return value if value is None or isinstance(value, int | float | str | torch.dtype) else id(value)

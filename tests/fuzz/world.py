"""Two models of the same weights, one of them wrapped, and what must hold between them after every operation."""

import copy
import inspect
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from fuzz.calls import DrawnCall
from fuzz.edits import OwnLinear, OwnModule
from oracle import Outcome, assert_same, num_iterations, outcome
from tiny import ARCHITECTURES, make_model
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

import orca_hf
from orca_hf import OrcaConfig
from orca_hf.attention_name import IMPLEMENTATION
from orca_hf.runner import CACHE_FIELD

# Sizes at which weights are packed for real, and attention's K/V are read by the compiled kernels.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 301}
# Logits of native's two best tokens that are this close may change places when a product adds in another order.
NEAR = 1e-4
# Logits round by as much in wide models, at low temperatures, and where an edit has made them large.
_CLOSE = 3e-2
# By how many standard deviations of a row's logits rounding to bfloat16 may let a worse token win.
_ROUNDED = 0.75


@dataclass(frozen=True)
class ModelSpec:
    """Which model a case is about."""

    architecture: str
    wide: bool
    dtype: torch.dtype
    attention: str

    def make(self) -> PreTrainedModel:
        """A random model; the same one at every call."""
        model = make_model(self.architecture, **(WIDE if self.wide else {}))
        if can_choose_attention(model):
            model.set_attn_implementation(self.attention)
        return model.to(self.dtype)


def can_choose_attention(model: PreTrainedModel) -> bool:
    """Whether there are both eager and sdpa attention for it."""
    return bool(model._supports_attention_backend and model._supports_sdpa)


def can_be_wide(architecture: str) -> bool:
    """Whether `WIDE` says all there is to say about an architecture's sizes."""
    sizes = ARCHITECTURES[architecture]
    return {"hidden_size", "vocab_size"} <= sizes.keys() and WIDE["hidden_size"] % sizes["num_attention_heads"] == 0


class MismatchError(AssertionError):
    """What came out is not what comes out natively."""


class HangError(MismatchError):
    """Nothing comes out."""


@dataclass
class World:
    """The twins, and all that operations leave for those after them."""

    spec: ModelSpec
    config: OrcaConfig
    log: list[str] = field(default_factory=list)
    undo: list[tuple[str, Callable[[], object]]] = field(default_factory=list)
    turn: tuple[tuple[Tensor, Any], ...] | None = None  # of the last call with a cache: each twin's tokens and cache
    num_calls: int = 0
    num_by_orca: int = 0
    num_near_ties: int = 0
    rounded: bool = False  # within an autocast

    def __post_init__(self) -> None:
        self.native = self.spec.make()
        self.ours = orca_hf.wrap(self.spec.make(), self.config)

    @property
    def twins(self) -> tuple[PreTrainedModel, PreTrainedModel]:
        """The plain model and the wrapped one."""
        return self.native, self.ours

    @property
    def is_exact(self) -> bool:
        """Whether tokens must be native's: in bfloat16 a near tie can fall either way (README, "Neighbours")."""
        return self.spec.dtype is not torch.bfloat16 and not self.rounded

    @property
    def holds_all_rows(self) -> bool:
        """Whether all rows of a call fit into the K/V memory; else they draw otherwise (README, "Random numbers")."""
        return self.config.max_slots is not None and self.config.max_slots >= 1024

    @property
    def may_pad(self) -> bool:
        """Whether rows may be padded: natively eager attention in float64 makes NaN of it, as its mask overflows."""
        return self.spec.dtype is not torch.float64

    @property
    def _is_told_by_logits(self) -> bool:
        """Whether a forward over whole rows computes what one over their last tokens does, but for rounding.

        Not with dropout; not if a user's module looks at the shape; nor where a near tie exchanges an expert.
        """
        looks = any(isinstance(module, OwnModule | OwnLinear) for module in self.native.modules())
        return not (self.native.training or looks or hasattr(self.native.config, "num_experts_per_tok"))

    def draw_call(self, number: int, *, may_draw: bool = True) -> Callable[[], DrawnCall]:
        """The arguments of call `number`, made anew for each twin, as they may hold objects with a state."""
        return lambda: DrawnCall.draw(
            random.Random(number),
            is_exact=self.is_exact,
            may_draw=may_draw and self.holds_all_rows,
            has_words=not self.spec.wide,
            may_pad=self.may_pad,
        )

    def plain_call(self, number: int, num_tokens: int) -> Callable[[], DrawnCall]:
        """The same of a greedy call without anything else."""
        return lambda: DrawnCall.plain(random.Random(number), num_tokens, may_pad=self.may_pad)

    def compare(self, call: Callable[[], DrawnCall], native: Outcome, ours: Outcome) -> None:
        """Hold a call's outcome against native's.

        Raises:
            MismatchError: They differ.
        """
        if self.is_exact:
            try:
                assert_same(native.result, ours.result, atol=_CLOSE)
                assert ours.next_random == native.next_random, "the default generator is left elsewhere"
            except (AssertionError, ValueError) as error:  # the second where one has more items
                if not self._is_near_tie(call, native.result, ours.result):
                    frames = traceback.extract_tb(error.__traceback__)
                    raise MismatchError(str(error) or f"not so: {frames[-1].line}") from error
                self.num_near_ties += 1
        elif self._is_told_by_logits:
            self._compare_rounded(call(), native.result, ours.result)

    def _is_near_tie(self, call: Callable[[], DrawnCall], native: Any, ours: Any) -> bool:
        """Whether the first token of each row that differs was one of two that native itself can hardly tell apart."""
        given = call()
        tokens = [found for each in (native, ours) if (found := tokens_of(each, given)) is not None]
        if given.arguments.get("do_sample") or len(tokens) < 2:
            return False
        again = given.run(self.native, return_dict_in_generate=True, output_scores=True)
        width, differ = given.width, False
        for row, (left, right) in enumerate(zip(*(each.tolist() for each in tokens), strict=True)):
            first = next((i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), None)
            if first is None:
                continue
            if first < width:  # own code has written there
                return False
            differ = True
            best = again.scores[first - width][row].float().topk(2).values
            if best[0] - best[1] > NEAR:
                return False
        return differ

    def _compare_rounded(self, call: DrawnCall, native: Any, ours: Any) -> None:
        if isinstance(native, Exception) or isinstance(ours, Exception):
            if type(native) is not type(ours):
                raise MismatchError(f"natively {native!r}, by Orca {ours!r}")
            return
        if type(native) is not type(ours):
            raise MismatchError(f"natively a {type(native)}, by Orca a {type(ours)}")
        tokens = tokens_of(ours, call)
        assert tokens is not None
        ends = call.ends(self.native)
        with torch.no_grad():
            mask = torch.cat([call.mask, torch.ones_like(tokens[:, call.width :])], dim=1)
            given = {"input_ids": tokens, "attention_mask": mask, "position_ids": (mask.cumsum(dim=1) - 1).clamp_min(0)}
            accepted = inspect.signature(type(self.native).forward).parameters
            logits = self.native(**{name: value for name, value in given.items() if name in accepted}).logits.float()
        for row, answer in enumerate(tokens[:, call.width :].tolist()):
            for i, token in enumerate(answer):
                scores = logits[row, call.width + i - 1]
                if (scores.max() - scores[token]) > _ROUNDED * scores.std():
                    raise MismatchError(
                        f"row {row} has {token} as new token {i}, which natively is no near tie: {answer}"
                    )
                if token in ends:
                    break

    def run(self, call: Callable[[], DrawnCall], seed: int) -> None:
        """A call on both, and the comparison."""
        self.log.append(f"    {call().describe()}")
        native = outcome(lambda: call().run_and_record(self.native), seed)
        before = num_iterations(self.ours)
        ours = outcome(lambda: call().run_and_record(self.ours), seed)
        self.num_calls += 1
        self.num_by_orca += num_iterations(self.ours) != before
        self.compare(call, native, ours)
        results = [each.result[0] if isinstance(each.result, tuple) else each.result for each in (native, ours)]
        caches = [getattr(each, CACHE_FIELD, None) for each in results]
        # Who writes over the padding makes a mask of ones of it, under which a next turn sees what the cache has there.
        if None not in caches and not call().writes:
            self.turn = tuple((each.sequences, cache) for each, cache in zip(results, caches, strict=True))

    def check_rest(self) -> None:
        """What must hold of the wrapped model between calls.

        Raises:
            MismatchError: Something of a call is left.
        """
        for native, ours in zip(self.native.modules(), self.ours.modules(), strict=True):
            if ("forward" in native.__dict__) != ("forward" in ours.__dict__):
                raise MismatchError(f"a {type(ours).__name__} keeps a forward of an iteration")
        implementation = self.ours.config._attn_implementation
        if implementation is not None and (type(implementation) is not str or implementation == str(IMPLEMENTATION)):
            raise MismatchError(f"config._attn_implementation is {implementation!r} after a call")
        for engine in self.ours.generate.engines:
            stats = engine.stats
            left = (stats.num_reserved, stats.num_admitted, stats.num_waiting, engine.is_driven)
            if any(left) or engine.scheduler.faults():
                raise MismatchError(f"reserved, admitted, waiting, driven: {left}; {engine.scheduler.faults()}")

    def edit(self, name: str, change: Callable[[PreTrainedModel], str]) -> None:
        """Do the same to both models."""
        said = [change(model) for model in self.twins]
        assert said[0] == said[1]
        self.log.append(f"    {name}: {said[0]}")

    def copy(self) -> None:
        """Go on with deep copies of the twins."""
        self.native, self.ours = copy.deepcopy(self.native), copy.deepcopy(self.ours)
        self.undo.clear()


def tokens_of(result: Any, call: DrawnCall) -> Tensor | None:
    """(num_rows, length) of what a call has returned, None if it was an error."""
    if isinstance(result, tuple) and len(result) == 2:
        result = result[0]
    if isinstance(result, GenerateDecoderOnlyOutput):
        result = result.sequences
    return result if isinstance(result, Tensor) and result.shape[1] >= call.width else None

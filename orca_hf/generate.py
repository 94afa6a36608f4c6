"""OrcaGenerate: takes the place of a model's generate(), runs what it can by Orca and hands the rest to the native one.

generate() itself does the preparing: validation, defaults, processors, criteria, expansion for several sequences. Its
official seam, `custom_generate`, then calls us in place of the decoding loop.
"""

import copy
import functools
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationMixin, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from orca_hf import random_state
from orca_hf.attention_context import attention_context, current_context
from orca_hf.config import OrcaConfig
from orca_hf.eligibility import GENERATE_KEYWORDS, call_reasons, input_reasons, output_reasons, prepared_reasons
from orca_hf.engines import Engine
from orca_hf.errors import OrcaError, UnsupportedError
from orca_hf.interruption import outermost
from orca_hf.known_code import KnownCode
from orca_hf.model_eligibility import (
    autocast_state,
    model_reasons,
    module_reasons,
    quantization_reasons,
    training_reasons,
)
from orca_hf.patches import all_modules, model_lock, undo_patches
from orca_hf.prepared_call import PreparedCall, max_length_of
from orca_hf.runner import ModelRunner, model_structure
from orca_hf.sampling import Streamer
from orca_hf.work import Work

logger = logging.getLogger(__name__)

_INSIDE = "generate() is called from inside a running call: a processor, criterion, streamer, hook or signal handler"

_OWN = "the model has a generate() of its own"


class OrcaGenerate:
    """A model's generate(), run by iteration-level scheduling. Set on the instance by `orca_hf.wrap`.

    Pickles and deep-copies with its model; each copy has an engine of its own. Threads may call it at the same time
    and share one batch.

    Args:
        model: The model it belongs to.
        config: The settings.
        own: What stood in its place on the instance, if anything did.
    """

    engine_type: type[Engine] = Engine

    def __init__(self, model: PreTrainedModel, config: OrcaConfig, own: Callable[..., Any] | None = None) -> None:
        self.model = model
        self.config = config
        self.own = own
        self._reset()

    def _reset(self) -> None:
        # An engine for each autocast the model is called under: K/V made under different ones must not meet.
        self._engines: dict[Any, Engine] = {}
        self._unsupported: dict[Any, tuple[Any, str]] = {}  # the structure that could not be run, and why
        self._lock = threading.RLock()  # guards the two; held for a trial
        self._counting = threading.RLock()  # guards what native calls write, which may come in the middle of a forward
        self._known = KnownCode(self.config.trust_modules)
        self._logged: set[str] = set()
        self.work = Work()
        self.num_native = 0  # calls that went to the native path
        _all.add(self)

    @property
    def __signature__(self) -> inspect.Signature:
        if self._calls_own:
            assert self.own is not None
            return inspect.signature(self.own)
        return _signature_of(type(self.model).generate)  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "config": self.config, "own": self.own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.model = state["model"]
        self.config = state["config"]
        self.own = state["own"]
        self._reset()

    def model_state(self) -> dict[str, Any]:
        """The state of the model, whose `__getstate__` this is while it is wrapped.

        What `copy.copy` makes shares everything with the model, this object too, which could not tell whose
        `generation_config` is meant. So a shallow copy is not wrapped.
        """
        state = dict(self.model.__dict__)
        if sys._getframe(1).f_code is copy.copy.__code__:
            _take_off(state, self.own)
        return state

    def put_on(self) -> None:
        """Take the place of the model's generate()."""
        self.model.__dict__.update(generate=self, __getstate__=self.model_state)

    def take_off(self) -> None:
        """Leave the model as `put_on` found it."""
        self.release()
        _take_off(self.model.__dict__, self.own)

    def __repr__(self) -> str:
        return f"OrcaGenerate({type(self.model).__name__}, {self.config})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """generate() of the wrapped model: same arguments, same result, same errors."""
        return outermost(lambda: self._call(args, kwargs), (self._lock, self._counting, *random_state.LOCKS))

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_inside():
            with attention_context(None):  # a signal's handler runs in the middle of a forward, too
                self._log_native([_INSIDE])
                return self._native(*args, **kwargs)
        if self._calls_own:  # whose arguments only it knows
            self._log_native([_OWN])
            return self._native(*args, **kwargs)
        args, kwargs = self._with_own(args, kwargs)
        arguments = self._bind(args, kwargs)
        modules = all_modules(self.model)  # one walk for all who look at them
        reasons, generation_config = self._reasons(arguments, modules)
        engine = None
        if not reasons:
            engine, reasons = self._find_engine(modules)
        if engine is not None:
            reasons = output_reasons(generation_config, engine.runner.has_native_cache)
        if engine is None or reasons:
            self._log_native(reasons)
            return self._native(*args, **kwargs)
        return self._prepare_and_run(engine, _seam_arguments(arguments, generation_config))

    def explain(self, **kwargs: Any) -> list[str]:
        """Every reason why a call with these arguments goes to the native path; empty if Orca runs it."""
        if self._calls_own:
            return [_OWN]
        arguments = self._bind(*self._with_own((), kwargs))
        modules = all_modules(self.model)
        reasons, generation_config = self._reasons(arguments, modules)
        input_ids = arguments.get("inputs")
        if input_ids is None:
            input_ids = arguments["kwargs"].get("input_ids")
        if reasons:
            if isinstance(input_ids, Tensor):
                attention_mask = arguments["kwargs"].get("attention_mask")
                max_length = _max_length(generation_config, input_ids.shape[-1])
                reasons += input_reasons(self.model, input_ids, attention_mask, max_length)
            return reasons
        engine, reasons = self._find_engine(modules)
        if engine is None:
            return reasons
        reasons = output_reasons(generation_config, engine.runner.has_native_cache)
        if reasons or input_ids is None:
            return reasons
        call = _seam_arguments(arguments, generation_config)
        has_streamer = call.pop("streamer", None) is not None

        def look(model: PreTrainedModel, input_ids: Tensor, **prepared: Any) -> list[str]:
            return self._plan(engine, has_streamer, input_ids, **prepared)[1]

        return self._native(**call, custom_generate=look)

    def prepare(self, **kwargs: Any) -> "Preparation":
        """Judge a call and have generate() prepare it, without running it. The streamer hears nothing.

        Raises:
            Exception: Whatever such a call raises before its first forward.
        """
        arguments = self._bind(*self._with_own((), kwargs))
        modules = all_modules(self.model)
        reasons, merged = self._reasons(arguments, modules)
        engine = None
        if not reasons:
            engine, reasons = self._find_engine(modules)
        if engine is not None:
            reasons = output_reasons(merged, engine.runner.has_native_cache)
        if reasons and (self._calls_own or not _can_be_looked_at(self.model, arguments, merged)):
            return Preparation(None, reasons, merged, None)
        has_streamer = arguments.get("streamer") is not None
        if has_streamer:
            arguments["streamer"] = _Deaf()
            if reasons:  # generate() does not judge a streamer's mode for a decoding loop of ours
                mode = merged.get_generation_mode(None)
                self._private("_validate_generation_mode")(mode, merged, {"streamer": arguments["streamer"]})

        def look(model: PreTrainedModel, input_ids: Tensor, **prepared: Any) -> Preparation:
            call, why = None, reasons
            if engine is not None and not reasons:
                try:
                    call, why = self._plan(engine, has_streamer, input_ids, **prepared)
                except UnsupportedError as error:
                    why = [str(error)]
            return Preparation(None if why else call, why, merged, prepared["stopping_criteria"])

        return self._native(**_seam_arguments(arguments, merged), custom_generate=look)

    def warm_up(self) -> None:
        """Make the engine that a call would want, so that the first one need not wait for the model's trial."""
        modules = all_modules(self.model)
        if not self._model_reasons(modules):
            self._find_engine(modules)

    def run_natively(self, reasons: list[str], **kwargs: Any) -> Any:
        """The model's own generate(), for these reasons."""
        self._log_native(reasons)
        return self._native(**kwargs)

    def release(self) -> None:
        """Give K/V memory and packed weights of idle engines back; they are made again when needed."""
        with self._lock:
            for engine in self._engines.values():
                engine.release()

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engines made so far: one, unless the model has been called under several kinds of autocast."""
        with self._lock:
            return tuple(self._engines.values())

    @property
    def _native(self) -> Callable[..., Any]:
        """The model's own generate(), bound to it."""
        if self._calls_own:
            assert self.own is not None
            return self.own
        return type(self.model).generate.__get__(self.model)  # type: ignore[attr-defined]

    @property
    def _calls_own(self) -> bool:
        """Whether the instance had a generate() that is more than its class's with some arguments filled in."""
        return self.own is not None and self._filled_in is None

    @property
    def _filled_in(self) -> "functools.partial[Any] | None":
        """What the instance had, if it is its class's generate() with some arguments filled in."""
        own = self.own
        if not isinstance(own, functools.partial):
            return None
        function = own.func
        if isinstance(function, OrcaGenerate):  # a model that was wrapped when they were filled in
            return own if function.model is self.model and function.own is None else None
        is_class_own = getattr(function, "__func__", None) is type(self.model).generate  # type: ignore[attr-defined]
        return own if is_class_own and getattr(function, "__self__", None) is self.model else None

    def _with_own(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        filled_in = self._filled_in
        return (args, kwargs) if filled_in is None else ((*filled_in.args, *args), {**filled_in.keywords, **kwargs})

    def _is_inside(self) -> bool:
        """Whether this thread is inside an iteration, a trial or a change of an engine's state."""
        return (
            current_context() is not None
            or self._lock._is_owned()  # type: ignore[attr-defined]
            or any(engine.driven_by_this_thread for engine in self._engines.copy().values())
        )

    def _private(self, name: str) -> Callable[..., Any]:
        """A method of GenerationMixin that is not part of its public interface."""
        return getattr(type(self.model), name).__get__(self.model)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = _signature_of(type(self.model).generate).bind(*args, **kwargs)  # type: ignore[attr-defined]
        bound.arguments.setdefault("kwargs", {})
        return bound.arguments

    def _reasons(self, arguments: dict[str, Any], modules: tuple[nn.Module, ...]) -> tuple[list[str], GenerationConfig]:
        options = {name: value for name, value in arguments["kwargs"].items() if name not in GENERATE_KEYWORDS}
        merged, _ = self._private("_prepare_generation_config")(arguments.get("generation_config"), **options)
        return self._model_reasons(modules) + call_reasons(self.model, arguments, merged), merged

    def _model_reasons(self, modules: tuple[nn.Module, ...]) -> list[str]:
        return [
            *([_OWN] if self._calls_own else ()),
            *model_reasons(self.model, modules),
            *module_reasons(modules, self._known),
            *training_reasons(self.model, modules),
        ]

    def _log_native(self, reasons: list[str]) -> None:
        with self._counting:
            self.num_native += 1
        for reason in reasons:
            if reason not in self._logged:
                self._logged.add(reason)
                logger.warning("generate() runs natively, without Orca: %s.", reason)

    def _find_engine(self, modules: tuple[nn.Module, ...]) -> tuple[Engine | None, list[str]]:
        autocast = autocast_state(self.model)
        if self._is_inside():
            return None, [_INSIDE]
        stale = self._engines.get(autocast)
        if stale is not None and stale.runner.is_stale(modules):
            with model_lock(self.model):  # in the middle of another thread's forward, weights may be on their way
                modules = all_modules(self.model)
            if not stale.runner.is_stale(modules):
                stale = None
        else:
            stale = None
        with self._lock:
            engine = self._engines.get(autocast)
            if engine is stale:
                engine = None  # whoever still runs on it holds it; its memory goes when they are done
            if engine is not None:
                return engine, []
            structure, why = self._unsupported.get(autocast, (None, ""))
            if structure != model_structure(modules):
                try:
                    if quantized := quantization_reasons(self.model, modules):
                        raise UnsupportedError(quantized[0])
                    engine = self.engine_type(ModelRunner(self.model, self.config, autocast), self.config)
                except UnsupportedError as reason:
                    self._engines.pop(autocast, None)
                    why = str(reason)
                    self._unsupported[autocast] = model_structure(modules), why
                except OrcaError:
                    raise
                except Exception as error:  # noqa: BLE001 - whatever a model not made for this raises; it may pass
                    self._engines.pop(autocast, None)
                    why = f"a trial iteration raised {type(error).__name__}: {error}"
                else:
                    engine.work = self.work
                    self._engines[autocast] = engine
                    return engine, []
            return None, [f"{type(self.model).__name__} cannot be run by Orca: {why}"]

    def _plan(
        self,
        engine: Engine,
        has_streamer: bool,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> tuple[PreparedCall | None, list[str]]:
        """What to do with a prepared call, as generate() hands it to a decoding loop: run it, or the reasons not to."""
        attention_mask = model_kwargs.get("attention_mask")
        max_length = max_length_of(stopping_criteria)
        reasons = input_reasons(self.model, input_ids, attention_mask, max_length) or prepared_reasons(
            input_ids,
            attention_mask,
            model_kwargs.get("position_ids"),
            generation_config._pad_token_tensor,
            stopping_criteria,
            max_length,
            engine.runner.vocab_size,
        )
        if reasons:
            return None, reasons
        call = PreparedCall(
            engine, input_ids, attention_mask, logits_processor, stopping_criteria, generation_config, self._known
        )
        return call, call.reasons(has_streamer)

    def _prepare_and_run(self, engine: Engine, call: dict[str, Any]) -> Any:
        streamer: Streamer | None = call.get("streamer")  # generate() gives it the prompt, and not to us

        def decode(model: PreTrainedModel, input_ids: Tensor, **prepared: Any) -> Any:
            planned = None
            try:
                planned, reasons = self._plan(engine, streamer is not None, input_ids, **prepared)
                if planned is not None and not reasons:
                    result = planned.run(streamer)
            except BaseException as error:
                if not isinstance(error, UnsupportedError) or (planned is not None and planned.has_tokens):
                    # Natively the end is never told; whoever reads the stream would wait for it for ever.
                    _end(streamer)
                    raise
                reasons = [str(error)]
            if not reasons:
                _end(streamer)
                return result
            self._log_native(reasons)
            return self._private("_sample")(input_ids, streamer=streamer, **prepared)

        return self._native(**call, custom_generate=decode)


@dataclass(frozen=True, slots=True)
class Preparation:
    """A call that is ready to run.

    Attributes:
        call: What Orca is to run; None where native generate() is to.
        reasons: Why native generate() is to.
        generation_config: The call's configuration, with everything merged that generate() merges.
        criteria: When its rows end; None where generate() would have run the model to prepare them.
    """

    call: PreparedCall | None
    reasons: list[str]
    generation_config: GenerationConfig
    criteria: StoppingCriteriaList | None


class _Deaf(BaseStreamer):
    """A streamer for a call that is only prepared."""

    def put(self, value: Tensor) -> None:
        pass

    def end(self) -> None:
        pass


def _can_be_looked_at(model: PreTrainedModel, arguments: dict[str, Any], merged: GenerationConfig) -> bool:
    """Whether generate() can prepare a call that goes native without running anything."""
    return (
        type(model).generate is GenerationMixin.generate  # type: ignore[attr-defined]
        and not model.config.is_encoder_decoder
        and arguments.get("custom_generate") is None
        and arguments.get("assistant_model") is None
        and merged.cache_implementation != "paged"
        and not merged.token_healing
        and model.generation_config.stop_strings is None
    )


# Every wrapped model's, for the child of a fork: there, no thread goes on that drives an engine or holds a lock.
_all: WeakSet[OrcaGenerate] = WeakSet()


def _start_anew() -> None:
    for generate in list(_all):
        generate._reset()
        undo_patches(generate.model)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


@functools.cache
def _signature_of(generate: Callable[..., Any]) -> inspect.Signature:
    """A method's signature, bound."""
    signature = inspect.signature(generate)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _take_off(state: dict[str, Any], own: Callable[..., Any] | None) -> None:
    """Have a model's state be that of a model that is not wrapped."""
    for name in ("generate", "__getstate__"):
        state.pop(name, None)
    if own is not None:
        state["generate"] = own


def _end(streamer: Streamer | None) -> None:
    if streamer is not None:
        streamer.end()


def _max_length(generation_config: GenerationConfig, prompt_len: int) -> int | None:
    if generation_config.max_new_tokens is not None:
        return prompt_len + generation_config.max_new_tokens
    return generation_config.max_length


def _seam_arguments(arguments: dict[str, Any], merged: GenerationConfig) -> dict[str, Any]:
    """generate()'s arguments, by name, for a call with a decoding loop of ours."""
    call = {**{name: value for name, value in arguments.items() if name != "kwargs"}, **arguments["kwargs"]}
    call.pop("custom_generate", None)
    _move_stop_strings(call, merged)
    return call


def _move_stop_strings(call: dict[str, Any], merged: GenerationConfig) -> None:
    """Turn stop_strings into the criterion that generate() would make of them.

    generate() makes it from the tokenizer, which it does not keep for a custom decoding loop.
    """
    if merged.stop_strings is None:
        return
    tokenizer = call.pop("tokenizer", None)
    if tokenizer is None:
        return  # generate() says so
    criteria = StoppingCriteriaList(call.get("stopping_criteria") or ())
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):
        criteria.append(StopStringCriteria(stop_strings=merged.stop_strings, tokenizer=tokenizer))
    call["stopping_criteria"] = criteria
    call.pop("stop_strings", None)
    if call.get("generation_config") is not None:
        call["generation_config"] = copy.deepcopy(call["generation_config"])
        call["generation_config"].stop_strings = None

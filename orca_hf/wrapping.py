"""What a user calls: wrap a model, look at it, unwrap it."""

from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from orca_hf.config import OrcaConfig
from orca_hf.errors import ConfigError, ModelError
from orca_hf.generate import OrcaGenerate
from orca_hf.work import EngineStats

Model = TypeVar("Model")


@dataclass(frozen=True, slots=True)
class Explanation:
    """How a generate() call would run.

    Attributes:
        runs_by: "orca" or "native".
        reasons: Every reason why not by Orca; empty if it is.
        engines: State of the engines that the model has made so far.
    """

    runs_by: str
    reasons: tuple[str, ...]
    engines: tuple[EngineStats, ...]

    def __str__(self) -> str:
        if self.reasons:
            return f"{self.runs_by}: {'; '.join(self.reasons)}"
        without = [engine.no_graphs for engine in self.engines if engine.no_graphs is not None]
        return f"{self.runs_by}, without CUDA graphs: {'; '.join(without)}" if without else self.runs_by


def wrap(model: Model, config: OrcaConfig | None = None) -> Model:
    """Make `model.generate()` run by iteration-level scheduling.

    Sets attributes of one instance, `generate` and what copies it, and touches nothing else: no weight is copied or
    changed, `isinstance`, `save_pretrained`, pickling, PEFT and training go on as before. A `generate` that the
    instance had is called in place of its class's, and is there again after `unwrap`. Wrapping a wrapped model changes
    its settings if `config` is given, and does nothing otherwise.

    Args:
        model: A causal language model of transformers, or one inside `torch.compile`, DDP or PEFT.
        config: The settings; the defaults if None.

    Returns:
        The object passed in.

    Raises:
        ModelError: It is not a causal language model.
        ConfigError: `config` is not an `OrcaConfig`.
    """
    if config is not None and not isinstance(config, OrcaConfig):
        raise ConfigError(f"config is {config!r}, but must be an orca_hf.OrcaConfig, for instance OrcaConfig().")
    inner = _find_causal_lm(model)
    current = _orca_generate(inner)
    if current is None:
        OrcaGenerate(inner, config or OrcaConfig(), inner.__dict__.get("generate")).put_on()
    elif config is not None and config != current.config:
        OrcaGenerate(inner, config, current.own).put_on()
    return model


def unwrap(model: Model) -> Model:
    """Undo `wrap`: the model is as it was, and its K/V memory and packed weights are given back.

    A model that is not wrapped is left alone.

    Returns:
        The object passed in.
    """
    inner = _find_causal_lm(model)
    current = _orca_generate(inner)
    if current is not None:
        current.take_off()
    return model


def is_wrapped(model: object) -> bool:
    """Whether `model.generate()` goes through Orca."""
    inner = _find_pretrained(model)
    return inner is not None and _orca_generate(inner) is not None


def release(model: Model) -> Model:
    """Give back the K/V memory and packed weights of an idle wrapped model; the next call makes them again.

    Returns:
        The object passed in.
    """
    current = _orca_generate(_find_causal_lm(model))
    if current is not None:
        current.release()
    return model


def explain(model: object, generation_config: GenerationConfig | None = None, **generate_kwargs: Any) -> Explanation:
    """Say how `model.generate(generation_config=..., **generate_kwargs)` would run, without running it.

    The first time it may run a forward over a few tokens, as the first generate() does.

    Args:
        model: A wrapped model, or one that could be.
        generation_config: As for generate().
        **generate_kwargs: As for generate(); with `input_ids` the call is prepared as generate() prepares it, and the
            rows are judged too.

    Raises:
        ModelError: `model` is not a causal language model.
        Exception: Whatever such a call raises before its first forward.
    """
    inner = _find_causal_lm(model)
    generate = _orca_generate(inner)
    if generate is None:
        reasons = ["the model is not wrapped; call orca_hf.wrap(model)"]
        reasons += OrcaGenerate(inner, OrcaConfig()).explain(generation_config=generation_config, **generate_kwargs)
        return Explanation("native", tuple(reasons), ())
    reasons = generate.explain(generation_config=generation_config, **generate_kwargs)
    engines = tuple(engine.stats for engine in generate.engines)
    return Explanation("native" if reasons else "orca", tuple(reasons), engines)


def orca_generate(model: object) -> OrcaGenerate:
    """The generate() of a wrapped model, for those who ask more of it than to be called.

    Raises:
        ModelError: `model` is not wrapped.
    """
    found = _orca_generate(_find_causal_lm(model))
    if found is None:
        raise ModelError("The model is not wrapped; call orca_hf.wrap(model).")
    return found


def _orca_generate(model: PreTrainedModel) -> OrcaGenerate | None:
    found = model.__dict__.get("generate")
    return found if isinstance(found, OrcaGenerate) else None


def _find_pretrained(model: object) -> PreTrainedModel | None:
    """The transformers model inside what torch.compile, DDP and PEFT make of it."""
    for _ in range(8):  # wrappings of wrappings; a bound, so that an odd object cannot loop for ever
        if isinstance(model, PreTrainedModel):
            return model
        if not isinstance(model, nn.Module):
            return None
        if callable(base := getattr(model, "get_base_model", None)):
            model = base()
        elif "_orig_mod" in model._modules:
            model = model._modules["_orig_mod"]
        elif "module" in model._modules:
            model = model._modules["module"]
        else:
            return None
    return None


def _find_causal_lm(model: object) -> PreTrainedModel:
    inner = _find_pretrained(model)
    if inner is None:
        raise ModelError(
            f"Got {type(model).__name__}, but a causal language model of transformers is needed, for instance "
            "AutoModelForCausalLM.from_pretrained(...)."
        )
    if not inner.can_generate():
        raise ModelError(
            f"Got {type(inner).__name__}, which cannot generate; load the checkpoint with AutoModelForCausalLM."
        )
    return inner

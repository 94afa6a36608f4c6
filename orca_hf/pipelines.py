"""`transformers.pipeline("text-generation")` in which many prompts share one batch.

Preparing the prompts, decoding the tokens and every option are transformers' own code; only the stage that runs the
model is replaced. Each prompt gets its own generate() call, exactly as with batch_size=1: no padding, so nothing that
looks at tokens or lengths can tell that it had neighbours. The calls are made from threads, and the wrapped model
serves all threads from one batch, which prompts enter and leave as they come and end.
"""

import logging
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from types import GeneratorType
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, TextGenerationPipeline
from transformers.generation import StopStringCriteria

from orca_hf.concurrent_calls import ConcurrentCalls
from orca_hf.config import OrcaConfig
from orca_hf.errors import ConfigError
from orca_hf.loading import load
from orca_hf.wrapping import explain, wrap

logger = logging.getLogger(__name__)

_TASK = "text-generation"


def pipeline(
    task: str | None = None,
    model: str | os.PathLike[str] | PreTrainedModel | None = None,
    config: Any = None,
    tokenizer: Any = None,
    feature_extractor: Any = None,
    image_processor: Any = None,
    video_processor: Any = None,
    processor: Any = None,
    revision: str | None = None,
    use_fast: bool = True,
    token: str | bool | None = None,
    device: int | str | torch.device | None = None,
    device_map: Any = None,
    dtype: Any = "auto",
    trust_remote_code: bool | None = None,
    model_kwargs: dict[str, Any] | None = None,
    pipeline_class: type["OrcaTextGenerationPipeline"] | None = None,
    *,
    orca_config: OrcaConfig | None = None,
    **kwargs: Any,
) -> "OrcaTextGenerationPipeline":
    """Makes a text-generation pipeline: `transformers.pipeline`, argument by argument.

    Args:
        task: `"text-generation"`, which is also what None means.
        model: A folder or hub id, loaded by `orca_hf.load` (so from safetensors only), or a model, which is wrapped
            in place. It has to be given; there is no default model.
        config: The *model's* configuration, as in transformers.
        tokenizer: A tokenizer or where to load it from. Needed when `model` is a model.
        feature_extractor: As in transformers, like every argument up to `model_kwargs`.
        image_processor: As in transformers.
        video_processor: As in transformers.
        processor: As in transformers.
        revision: As in transformers.
        use_fast: As in transformers.
        token: As in transformers.
        device: As in transformers.
        device_map: As in transformers.
        dtype: As in transformers, except that a dtype that fails to load is not retried in float32.
        trust_remote_code: As in transformers, except that None means False and never asks.
        model_kwargs: As in transformers.
        pipeline_class: A subclass of `OrcaTextGenerationPipeline`.
        orca_config: How to schedule.
        **kwargs: Options for every call: those of `OrcaTextGenerationPipeline`, of `TextGenerationPipeline` and of
            generate().

    Returns:
        The pipeline.

    Raises:
        ConfigError: Another task, no model, or a foreign pipeline class.
        CheckpointError: What `orca_hf.load` finds wrong with the files.
        ModelError: The model is not a causal language model.
        ValueError: Arguments that transformers does not take together.
    """
    if task not in (None, _TASK):
        raise ConfigError(f"task is {task!r}, but orca_hf.pipeline has {_TASK!r} only. Use transformers.pipeline.")
    if model is None:
        raise ConfigError("model is None, but it is needed: a folder, a hub id, or a model together with tokenizer=.")
    pipeline_class = pipeline_class or OrcaTextGenerationPipeline
    if not issubclass(pipeline_class, OrcaTextGenerationPipeline):
        raise ConfigError(f"pipeline_class is {pipeline_class!r}, but must derive from OrcaTextGenerationPipeline.")

    model_kwargs = dict(model_kwargs or {})
    if isinstance(model, str | os.PathLike):
        load_kwargs = _load_kwargs(model_kwargs, kwargs, device_map=device_map, dtype=dtype)
        model = load(
            model,
            config=orca_config,
            revision=revision,
            token=token,
            trust_remote_code=trust_remote_code,
            **load_kwargs,
        )
        tokenizer = model.name_or_path if tokenizer is None else tokenizer
        if device is None and load_kwargs["device_map"] is not None and not hasattr(model, "hf_device_map"):
            device = model.device  # a map to one device leaves no trace but this
        device_map = dtype = None
        kwargs.pop("torch_dtype", None)
        for name in ("device_map", "dtype", "torch_dtype"):
            model_kwargs.pop(name, None)
    make: Any = transformers.pipeline  # its overloads are too many for a type checker
    made: OrcaTextGenerationPipeline = make(
        _TASK,
        model=model,
        config=config,
        tokenizer=tokenizer,
        feature_extractor=feature_extractor,
        image_processor=image_processor,
        video_processor=video_processor,
        processor=processor,
        revision=revision,
        use_fast=use_fast,
        token=token,
        device=device,
        device_map=device_map,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        model_kwargs=model_kwargs,
        pipeline_class=pipeline_class,
        orca_config=orca_config,
        **kwargs,
    )
    return made


def _load_kwargs(
    model_kwargs: dict[str, Any], kwargs: dict[str, Any], *, device_map: Any, dtype: Any
) -> dict[str, Any]:
    """What `load` gets: transformers lets some arguments come from two places, and refuses both at once."""
    merged = dict(model_kwargs)
    if kwargs.get("torch_dtype") is not None and dtype == "auto":
        dtype = kwargs["torch_dtype"]
    if "torch_dtype" in merged:
        merged.setdefault("dtype", merged.pop("torch_dtype"))
    for name, value, unset in (("device_map", device_map, None), ("dtype", dtype, "auto")):
        if name in merged and value != unset:
            raise ValueError(f"{name} is given twice: {value!r}, and {merged[name]!r} in model_kwargs. Use only one.")
        merged.setdefault(name, value)
    for name in ("local_files_only", "code_revision"):
        if name in kwargs:
            merged.setdefault(name, kwargs[name])
    return merged


class OrcaTextGenerationPipeline(TextGenerationPipeline):
    """transformers' `TextGenerationPipeline`, with prompts that share a batch.

    It takes what that class takes and gives what that class gives with `batch_size=1`, in the same order and nesting.
    A tuple or a column of a `datasets.Dataset` counts as a list, and any iterable as a generator, where transformers
    takes lists and generators only.

    *Sampled prompts* draw from a stream of random numbers each, seeded in the prompts' order from PyTorch's default
    generator: the same seed gives the same tokens, whatever shares the batch. They are not the tokens that transformers
    draws, which takes the first prompt's random numbers, then the second's, from one stream; a single prompt gets
    those. The pipeline samples unless told otherwise, by transformers' own default: pass `do_sample=False` for greedy
    decoding.

    One prompt at a time (or `batch_size` in a padded call), as in transformers, go calls that Orca does not run
    (`orca_hf.explain` says which), and calls that share an object which one prompt may change for the next: a streamer,
    an assistant model, logits processors, stopping criteria, a cache. The reason is logged once.

    A call runs `batch_size` prompts at once if that is given, else as many as the engine can use. `num_workers` works
    as in transformers: processes that tokenize.

    Additional options, of the constructor and of each call:

    * `look_ahead`: For a generator or dataset, how many prompts may be taken from it before the first of them is
      asked for, 4 * `max_batch_size` by default. Memory is bounded by it. 1 takes a prompt when its result is wanted,
      for a generator whose next prompt depends on the last result. A list is in memory anyway, so all of it counts
      as taken.
    * `progress`: True for a tqdm bar with prompts done and tokens per second, or a class that can be called like
      `tqdm(total=..., unit=...)`. Without effect on a single prompt.

    An exception from the caller's generator or from a prompt arrives in its turn, after the results before it, and
    ends the rest. So does leaving the loop, or Ctrl-C: prompts that wait are dropped and those that run stop at their
    next token.

    Args:
        model: Wrapped in place if it is not yet.
        *args: As in `TextGenerationPipeline`.
        orca_config: How to schedule; None keeps the settings of a model that is wrapped already.
        **kwargs: As in `TextGenerationPipeline`, and the options above.

    Raises:
        ConfigError: `look_ahead` or `progress` is out of range.
        ModelError: The model is not one that can be wrapped.
    """

    def __init__(
        self, model: PreTrainedModel, *args: Any, orca_config: OrcaConfig | None = None, **kwargs: Any
    ) -> None:
        model = wrap(model, orca_config)
        in_use = getattr(model.generate, "config", orca_config)
        self._max_batch_size = (in_use if isinstance(in_use, OrcaConfig) else OrcaConfig()).max_batch_size
        self._reasons_told: set[str] = set()
        super().__init__(model, *args, **kwargs)

    def __call__(self, text_inputs: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """As in transformers; see the class."""
        self.call_count = 0  # transformers counts calls to advise batching, which is what happens here
        return super().__call__(_as_list_or_generator(text_inputs), **kwargs)

    def _sanitize_parameters(  # type: ignore[override]
        self, look_ahead: int | None = None, progress: Any = None, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        preprocess, forward, postprocess = super()._sanitize_parameters(**kwargs)
        if look_ahead is not None:
            if isinstance(look_ahead, bool) or not isinstance(look_ahead, int) or look_ahead < 1:
                raise ConfigError(f"look_ahead is {look_ahead!r}, but must be an integer of at least 1.")
            forward["look_ahead"] = look_ahead
        if progress is not None:
            if not isinstance(progress, bool) and not callable(progress):
                raise ConfigError(f"progress is {progress!r}, but must be True, False or a class like tqdm.")
            postprocess["progress"] = progress
        return preprocess, forward, postprocess

    def run_single(
        self,
        inputs: Any,
        preprocess_params: dict[str, Any],
        forward_params: dict[str, Any],
        postprocess_params: dict[str, Any],
    ) -> Any:
        """As in transformers: one prompt, in the calling thread."""
        forward_params = {key: value for key, value in forward_params.items() if key != "look_ahead"}
        postprocess_params = {key: value for key, value in postprocess_params.items() if key != "progress"}
        return super().run_single(inputs, preprocess_params, forward_params, postprocess_params)

    def postprocess(  # type: ignore[override]
        self, model_outputs: Any, *args: Any, meter: "_Meter | None" = None, **kwargs: Any
    ) -> Any:
        """As in transformers, with a look at how many tokens there are."""
        if meter is not None:
            meter.num_tokens += self._num_new_tokens(model_outputs)
        return super().postprocess(model_outputs, *args, **kwargs)

    def _num_new_tokens(self, model_outputs: Any) -> int:
        assert self.tokenizer is not None  # it made the prompt
        prompt = model_outputs["input_ids"]
        new = model_outputs["generated_sequence"][..., 0 if prompt is None else prompt.shape[-1] :]
        padding = self.tokenizer.pad_token_id
        if padding is None:
            return int(new.numel())
        is_padding = new == padding
        # Where padding is the end token too, the first one of a row was generated.
        num_ends = is_padding.any(dim=-1).sum() if padding == self.tokenizer.eos_token_id else 0
        return int((~is_padding).sum() + num_ends)

    def get_iterator(
        self,
        inputs: Any,
        num_workers: int,
        batch_size: int,
        preprocess_params: dict[str, Any],
        forward_params: dict[str, Any],
        postprocess_params: dict[str, Any],
    ) -> "_Stream":
        """The results of many prompts, in order; see the class."""
        forward_params, postprocess_params = dict(forward_params), dict(postprocess_params)
        look_ahead = forward_params.pop("look_ahead", 4 * self._max_batch_size)
        if isinstance(inputs, list):
            look_ahead = max(look_ahead, len(inputs))
        progress = postprocess_params.pop("progress", None)
        meter = None
        if progress:
            meter = _Meter(tqdm if progress is True else progress, len(inputs) if isinstance(inputs, Sized) else None)
            postprocess_params["meter"] = meter

        alone = isinstance(inputs, list) and len(inputs) == 1

        def start() -> Iterator[Any]:
            reason = None if alone else self._why_in_turn(forward_params)
            stages = TextGenerationPipeline.get_iterator(
                self,
                inputs,
                num_workers,
                1 if reason is None else batch_size,
                preprocess_params,
                forward_params,
                postprocess_params,
            )
            if alone:
                return iter(stages)
            if reason is not None:
                self._log_in_turn(reason, batch_size)
                return iter(stages)
            self._prepare_stop_strings(forward_params)
            # The last stage decodes, the one before it runs the model, and that one reads the tokenized prompts.
            calls = ConcurrentCalls(
                stages.loader.loader,
                self.forward,
                forward_params,
                num_threads=min(look_ahead, batch_size if batch_size > 1 else 2 * self._max_batch_size),
                look_ahead=look_ahead,
                device=self.device,
                sampled=bool(self._generation_params(forward_params).get("do_sample")),
            )
            return _decoded(calls, self.postprocess, postprocess_params)

        return _Stream(start, inputs, meter)

    def _why_in_turn(self, forward_params: dict[str, Any]) -> str | None:
        """Why these prompts cannot run at the same time and give what they give one after the other, if so."""
        for name, value in forward_params.items():
            if not _is_plain(value):
                return f"{name} is shared by all prompts, and one may change it for the next"
        options = {key: value for key, value in forward_params.items() if key != "prefix_length"}
        options = self._prepare_generate_kwargs(options)
        explanation = explain(self.model, **options)
        return None if explanation.runs_by == "orca" else "; ".join(explanation.reasons)

    def _generation_params(self, forward_params: dict[str, Any]) -> dict[str, Any]:
        """What is set in the configuration that generate() will be given."""
        params: dict[str, Any] = self._get_set_generation_params(self._prepare_generate_kwargs(forward_params))
        return params

    def _prepare_stop_strings(self, forward_params: dict[str, Any]) -> None:
        """Lets transformers read the vocabulary for stop strings now; it keeps the result for the calls to come.

        It uses the tokenizer for that, whose settings it changes: not while this thread tokenizes prompts with it.
        """
        stop_strings = self._generation_params(forward_params).get("stop_strings")
        if stop_strings and forward_params.get("tokenizer") is not None:
            StopStringCriteria(forward_params["tokenizer"], stop_strings)

    def _log_in_turn(self, reason: str, batch_size: int) -> None:
        if batch_size == 1 and reason not in self._reasons_told:
            self._reasons_told.add(reason)
            logger.warning("The prompts run one at a time, as in transformers' pipeline: %s.", reason)


def _is_plain(value: object) -> bool:
    """Whether generate() only reads `value`."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    # A tokenizer is there for stop strings; generate() copies a generation config before it changes it.
    plain = (bool, int, float, str, torch.dtype, torch.device, GenerationConfig, PreTrainedTokenizerBase)
    return value is None or isinstance(value, plain)


def _as_list_or_generator(inputs: Any) -> Any:
    """Turns what is only like a list or a generator into one, since transformers asks for the types themselves."""
    if isinstance(inputs, str | bytes | list | Mapping | Dataset | GeneratorType):
        return inputs
    if isinstance(inputs, Sequence):
        return list(inputs)
    if isinstance(inputs, Iterable):
        return (item for item in inputs)
    return inputs


class _Stream:
    """What a pipeline returns for a dataset or a generator.

    Each loop over it is an iterator of its own, so leaving the loop ends what the loop had started, even while the
    caller holds on to the stream.
    """

    def __init__(self, start: Callable[[], Iterator[Any]], sized: Any, meter: "_Meter | None") -> None:
        self._start = start
        self._sized = sized
        self._meter = meter

    def __len__(self) -> int:
        return len(self._sized)

    def __iter__(self) -> Iterator[Any]:
        results = self._start()
        return results if self._meter is None else self._meter.around(results)


@dataclass(slots=True)
class _Meter:
    """A progress bar over prompts that also knows how many tokens they made."""

    bar_class: Callable[..., Any]
    total: int | None
    num_tokens: int = field(default=0, init=False)

    def around(self, results: Iterator[Any]) -> Generator[Any, None, None]:
        self.num_tokens = 0
        start = time.perf_counter()
        bar = self.bar_class(total=self.total, unit="prompt")
        try:
            for result in results:
                rate = self.num_tokens / max(time.perf_counter() - start, 1e-9)
                bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
                bar.update(1)
                yield result
        finally:
            bar.close()
            if isinstance(results, Generator):
                results.close()


def _decoded(
    calls: "ConcurrentCalls", postprocess: Callable[..., Any], params: dict[str, Any]
) -> Generator[Any, None, None]:
    outputs = iter(calls)
    try:
        for output in outputs:
            yield postprocess(output, **params)
    finally:
        outputs.close()

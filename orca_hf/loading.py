"""Loading a causal language model from safetensors: everything that is wrong with the files is said, by name.

Transformers initialises at random what a checkpoint lacks and says so in a warning. A server that answers with random
weights is worse than one that does not start, so here it is an error. The headers are read before the model is built
(eight bytes and a JSON text per file, no tensor data), which turns a half-downloaded shard into one clear sentence.
"""

import logging
import os
import re
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, is_offline_mode
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME as SAFE_INDEX
from transformers.utils import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS
from transformers.utils.hub import cached_file, get_checkpoint_shard_files
from transformers.utils.import_utils import is_peft_available
from transformers.utils.peft_utils import find_adapter_config_file

from orca_hf.checkpoint import check_files, read_header, read_json
from orca_hf.config import OrcaConfig
from orca_hf.errors import CheckpointError, ConfigError, ModelError
from orca_hf.wrapping import wrap

logger = logging.getLogger(__name__)

# What decides which files of a repository are read. Everything else goes to from_pretrained untouched.
_HUB_KEYS = ("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision", "subfolder")

_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".gguf", ".safetensors")

# Heads that are not a language model's, although the same config class also has one.
_OTHER_HEADS = {
    "an encoder-decoder": ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"),
    "a classifier": ("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "NEXT_SENTENCE_PREDICTION"),
    "a question answering model": ("QUESTION_ANSWERING", "MULTIPLE_CHOICE"),
}


def load(
    path_or_id: str | os.PathLike[str],
    *,
    dtype: Any = "auto",
    device_map: Any = "auto",
    config: OrcaConfig | None = None,
    **from_pretrained_kwargs: Any,
) -> PreTrainedModel:
    """Loads a causal language model from safetensors and wraps it.

    It is `AutoModelForCausalLM.from_pretrained` followed by `orca_hf.wrap`, with three differences: only safetensors
    are read, no code of the repository runs unless `trust_remote_code=True` is passed, and a weight that cannot be
    read is an error. `ignore_mismatched_sizes=True` therefore has no effect: a weight that does not fit is refused.
    A tensor that the model has no use for is only warned about, by transformers.

    Args:
        path_or_id: A folder written by `save_pretrained`, or a repository on the Hugging Face Hub. A folder with a
            PEFT adapter loads the base model that it names, then the adapter; it needs `peft`.
        dtype: As in `from_pretrained`; `"auto"` is the type that the checkpoint has.
        device_map: As in `from_pretrained`; `"auto"` lets accelerate spread the model over what the machine has.
            `None` leaves it on the CPU. `"auto"` gives way to `distributed_config`, `tp_plan` and `device_mesh`.
        config: How to schedule. The model's own configuration always comes from the checkpoint.
        **from_pretrained_kwargs: Anything else that `from_pretrained` takes: `revision`, `token`, `subfolder`,
            `variant`, `max_memory`, `offload_folder`, `quantization_config`, `attn_implementation` and so on.

    Returns:
        The model, wrapped, in eval mode.

    Raises:
        CheckpointError: A file is missing, truncated, malformed, not safetensors, or does not have what the model
            needs. The message names the file and the tensor.
        ModelError: What was found is not a causal language model, its configuration is invalid, or it needs code
            from its repository.
        ConfigError: An argument that cannot work here.
    """
    kwargs = dict(from_pretrained_kwargs)
    _check_arguments(config, kwargs)
    if "torch_dtype" in kwargs:  # the older name of dtype
        old_name = kwargs.pop("torch_dtype")
        dtype = old_name if dtype == "auto" else dtype
    if device_map == "auto" and any(kwargs.get(key) for key in ("distributed_config", "tp_plan", "device_mesh")):
        device_map = None
    source = _locate(path_or_id)
    model = _load_checked(source, dtype=dtype, device_map=device_map, **kwargs)
    return wrap(model, config)


def _check_arguments(config: object, kwargs: dict[str, Any]) -> None:
    """Refuses what contradicts the promises of `load`, and drops what repeats them."""
    if config is not None and not isinstance(config, OrcaConfig):
        raise ConfigError(
            f"config is a {type(config).__name__}, but load() takes an OrcaConfig there. To change the model's own "
            "configuration pass its fields as keyword arguments, or load it with from_pretrained and call wrap()."
        )
    if kwargs.pop("use_safetensors", None) is False:
        raise CheckpointError(
            "use_safetensors is False, but load() reads nothing except safetensors, since other formats can run code. "
            "Convert: AutoModelForCausalLM.from_pretrained(path, use_safetensors=False).save_pretrained(new_path)."
        )
    for name in ("from_tf", "from_flax"):
        if kwargs.pop(name, False):
            raise CheckpointError(f"{name} is True, but load() reads nothing except safetensors. Convert the weights.")
    if kwargs.get("gguf_file") is not None:
        raise CheckpointError(
            f"gguf_file is {kwargs['gguf_file']!r}, but load() reads nothing except safetensors. Load it with "
            "AutoModelForCausalLM.from_pretrained(path, gguf_file=...), then orca_hf.wrap() it or save_pretrained()."
        )
    if kwargs.get("output_loading_info"):
        raise ConfigError(
            "output_loading_info is True, but load() returns the model only: it raises on what the report would show."
        )
    for name in ("gguf_file", "output_loading_info", "ignore_mismatched_sizes"):
        kwargs.pop(name, None)


def _locate(path_or_id: str | os.PathLike[str]) -> str:
    """The folder or the hub id, as a string."""
    source = os.fspath(path_or_id)
    if source.startswith("~"):
        source = os.path.expanduser(source)
    if os.path.isdir(source):
        return source
    if os.path.exists(source):
        raise CheckpointError(f"{source} is a file. Give the folder that it lies in, with its config.json.")
    looks_local = isinstance(path_or_id, os.PathLike) or re.match(r"[./~\\]|[A-Za-z]:", source)
    if not source or looks_local or "\\" in source or source.count("/") != source.strip("/").count("/"):
        raise CheckpointError(f"{source!r} does not exist. Give a folder written by save_pretrained, or a hub id.")
    if source.count("/") > 1:
        raise CheckpointError(
            f"{source!r} does not exist as a folder (relative to {os.getcwd()}), and a hub id has at most one '/'."
        )
    return source


def _load_checked(source: str, **kwargs: Any) -> PreTrainedModel:
    """`from_pretrained` in which every weight is known to come from a file."""
    kwargs["trust_remote_code"] = bool(kwargs.get("trust_remote_code"))  # None would ask on the terminal
    hub = {key: kwargs[key] for key in _HUB_KEYS if key in kwargs}
    adapter = _adapter_config(source, hub)
    if adapter is not None:
        return _load_adapter(source, adapter, hub, kwargs)

    model_config = _read_config(source, hub, kwargs)
    explicit = getattr(model_config, "transformers_weights", None)
    files = _weight_files(source, explicit, kwargs.get("variant"), hub, _tied_weights(model_config))
    try:
        # Mismatches are let through here because the report names them, which transformers' error does not.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, output_loading_info=True, use_safetensors=True, ignore_mismatched_sizes=True, **kwargs
        )
    except SafetensorError as error:
        raise CheckpointError(f"{_listed(files)} cannot be read: {error}. Download it again.") from error
    except RuntimeError as error:
        if "conversion of the weights" not in str(error):
            raise
        raise CheckpointError(
            f"The tensors of {_listed(files)} cannot be put together into the model's weights: one is missing or has "
            "a wrong shape. The load report that transformers logged just before names it. Download it again."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{source} cannot be loaded: {error}") from error
    model: PreTrainedModel = loaded[0]
    _check_report(model, loaded[1], source, files, model_config.architectures)
    return model


def _adapter_config(source: str, hub: dict[str, Any]) -> str | None:
    """Path of the PEFT adapter's configuration, if that is what `source` has instead of a model."""
    has_config = os.path.isfile(os.path.join(source, hub.get("subfolder", ""), CONFIG_NAME))
    if not is_peft_available() and (has_config or not os.path.isdir(source)):
        return None  # as transformers does: without peft an adapter beside a model is not looked at
    found = find_adapter_config_file(source, **hub)
    if found is not None and has_config:
        raise CheckpointError(
            f"{source} has a model and a PEFT adapter ({found}), and transformers reports on the adapter's tensors "
            "only. Move the adapter's files to a folder of their own and load that."
        )
    return found


def _load_adapter(source: str, found: str, hub: dict[str, Any], kwargs: dict[str, Any]) -> PreTrainedModel:
    """The base model that an adapter names, then the adapter: two reports, where from_pretrained keeps the second."""
    if not is_peft_available():
        raise CheckpointError(f"{source} has a PEFT adapter ({found}) but no model. pip install peft to load it.")
    base = read_json(found).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise CheckpointError(f"{found} names no base_model_name_or_path, so there is no model to adapt.")
    adapter_name = kwargs.pop("adapter_name", "default")
    adapter_kwargs = {**hub, **(kwargs.pop("adapter_kwargs", None) or {})}
    path = _find(source, "adapter_model.safetensors", hub)
    if path is None:
        raise _no_safetensors(source, ["adapter_model.safetensors"], hub)
    read_header(path)
    of_the_base = {key: value for key, value in kwargs.items() if key not in ("revision", "subfolder", "variant")}
    model = _load_checked(_locate(base), **of_the_base)
    report: Any = model.load_adapter(source, adapter_name=adapter_name, adapter_kwargs=adapter_kwargs)
    _check_report(model, report.to_dict(), source, [path], None)
    return model


def _read_config(source: str, hub: dict[str, Any], kwargs: dict[str, Any]) -> PreTrainedConfig:
    """The model's configuration, known to be a causal language model's."""
    folder = os.path.join(source, hub.get("subfolder", ""))
    if os.path.isdir(source) and not os.path.isfile(os.path.join(folder, CONFIG_NAME)):
        raise CheckpointError(f"{folder} has no {CONFIG_NAME}. Give a folder written by save_pretrained.")
    check_files(folder, (CONFIG_NAME, GENERATION_CONFIG_NAME))
    trusted = kwargs["trust_remote_code"]
    try:
        config = AutoConfig.from_pretrained(
            source, trust_remote_code=trusted, code_revision=kwargs.get("code_revision"), **hub
        )
    except OSError as error:
        raise CheckpointError(f"{source}: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, StrictDataclassError) as error:
        raise ModelError(f"The configuration of {source} cannot be used: {error}") from error

    in_repository = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not (in_repository and trusted):
        advice = " Pass trust_remote_code=True if you trust the code in it." if in_repository else ""
        raise ModelError(
            f"{source} holds a {config.model_type!r} model, for which transformers has no causal language model "
            f"(architectures: {config.architectures}). load() takes what AutoModelForCausalLM does.{advice}"
        )
    architectures = set(config.architectures or ())
    for kind, tasks in _OTHER_HEADS.items():
        names = {name for task in tasks for name in _class_names(task)} - _class_names("CAUSAL_LM")
        if architectures and architectures <= names:
            raise ModelError(
                f"{source} holds {kind} ({', '.join(sorted(architectures))}), not a causal language model: the head "
                "that predicts tokens would be random. Give a checkpoint of a ...ForCausalLM class."
            )
    return config


def _class_names(task: str) -> set[str]:
    values = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").values()
    return {name for value in values for name in ((value,) if isinstance(value, str) else value)}


def _tied_weights(config: PreTrainedConfig) -> re.Pattern[str] | None:
    """What the model takes from another of its weights where a checkpoint does not have it; None for nothing.

    Whether that other one is there, transformers' report says after loading.
    """
    if not getattr(config, "tie_word_embeddings", False) or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    names = getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_tied_weights_keys", None)
    return re.compile("|".join(f"(?:{name})" for name in names)) if names else None


def _weight_files(
    source: str, explicit: str | None, variant: str | None, hub: dict[str, Any], tied: re.Pattern[str] | None
) -> list[str]:
    """Paths of the safetensors that `from_pretrained` will read, in the order of its own search, headers checked."""
    names = [explicit] if explicit else [_with_variant(name, variant) for name in (SAFE_WEIGHTS, SAFE_INDEX)]
    for name in names:
        path = _find(source, name, hub)
        if path is None:
            continue
        if name.endswith(".safetensors"):
            read_header(path)
            return [path]
        if name.endswith(".json"):
            return _shards(source, path, hub, tied)
    raise _no_safetensors(source, names, hub)


def _with_variant(name: str, variant: str | None) -> str:
    """model.safetensors -> model.fp16.safetensors, and the same before the .json of an index."""
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}.{variant}{dot}{suffix}" if variant else name


def _find(source: str, name: str, hub: dict[str, Any]) -> str | None:
    """Path of a file of the folder or repository (downloaded if need be), or None where it has no such file."""
    if os.path.isdir(source):
        path = os.path.join(source, hub.get("subfolder", ""), name)
        return path if os.path.isfile(path) else None
    try:
        found: str | None = cached_file(source, name, _raise_exceptions_for_missing_entries=False, **hub)
    except OSError as error:
        raise CheckpointError(f"{name} of {source} cannot be fetched: {error}") from error
    return found


def _no_safetensors(source: str, names: list[str], hub: dict[str, Any]) -> CheckpointError:
    """The error for a place without the weights that were looked for: says what weights it has instead."""
    subfolder = hub.get("subfolder", "")
    if os.path.isdir(source):
        present = os.listdir(os.path.join(source, subfolder))
    elif hub.get("local_files_only") or is_offline_mode():
        return CheckpointError(f"The local cache of {source} has none of {', '.join(names)}. Download it first.")
    else:
        present = HfApi(token=hub.get("token")).list_repo_files(source, revision=hub.get("revision"))
        present = [name for name in present if name.startswith(subfolder)]
    weights = sorted(name for name in present if name.endswith(_WEIGHTS))
    if not weights:
        return CheckpointError(f"{os.path.join(source, subfolder)} has no weights: none of {', '.join(names)}.")
    return CheckpointError(
        f"{os.path.join(source, subfolder)} has none of {', '.join(names)}, but {_listed(weights)}. load() reads "
        "nothing except safetensors in transformers' own naming, since other formats can run code. Convert: "
        "AutoModelForCausalLM.from_pretrained(path).save_pretrained(new_path). For a name with a variant in it "
        "pass variant=."
    )


def _shards(source: str, index: str, hub: dict[str, Any], tied: re.Pattern[str] | None) -> list[str]:
    """Paths of the shards that an index names, each known to have the tensors that the index says it has."""
    content = read_json(index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not isinstance(content.get("metadata"), dict):
        raise CheckpointError(f"{index} is not an index: it needs a 'metadata' object and a 'weight_map' object.")
    expected: dict[str, list[str]] = {}
    for tensor, shard in weight_map.items():
        # A name that leaves the folder would let a checkpoint read any file of the machine.
        if not isinstance(shard, str) or os.path.isabs(shard) or ".." in Path(shard).parts:
            raise CheckpointError(f"{index}: the file of {tensor} is {shard!r}, which is not a file beside the index.")
        if not shard.endswith(".safetensors"):
            raise CheckpointError(f"{index}: {tensor} is in {shard}, which is not safetensors. Convert the weights.")
        expected.setdefault(shard, []).append(tensor)

    shards = sorted(expected)
    if os.path.isdir(source):
        paths = [os.path.join(os.path.dirname(index), shard) for shard in shards]
    else:
        try:
            paths, _ = get_checkpoint_shard_files(source, index, **hub)
        except OSError as error:
            raise CheckpointError(f"A shard that {index} names cannot be fetched: {error}") from error
    for shard, path in zip(shards, paths, strict=True):
        if not os.path.isfile(path):
            raise CheckpointError(
                f"{path} is missing. {index} says that it has {_listed(expected[shard])}. Download it again."
            )
        header = read_header(path)
        absent = [tensor for tensor in expected[shard] if tensor not in header]
        untied = [tensor for tensor in absent if tied is None or not tied.search(tensor)]
        if untied:
            raise CheckpointError(f"{path} lacks {_listed(untied)}, which {index} says it has. Download both again.")
        if absent:
            logger.warning(
                "%s lacks %s, which %s says it has. The model takes that from a weight that it is tied to.",
                path, _listed(absent), index,
            )  # fmt: skip
    return paths


def _check_report(
    model: PreTrainedModel, report: dict[str, Any], source: str, files: list[str], architectures: list[str] | None
) -> None:
    """Refuses a model of which transformers initialised a weight itself."""
    where = files[0] if len(files) == 1 else f"{source} ({len(files)} files)"
    if report["mismatched_keys"]:
        shapes = [f"{name} {list(file)} (the model: {list(own)})" for name, file, own in report["mismatched_keys"]]
        raise CheckpointError(
            f"{where} does not fit {CONFIG_NAME}; tensors of a wrong shape: {_listed(sorted(shapes))}. Weights are "
            "never made up here, whatever ignore_mismatched_sizes says: use the configuration that belongs to them."
        )
    if report["missing_keys"]:
        name = type(model).__name__
        saved = ", ".join(architectures or ())
        reason = f" It was saved as {saved}, and is loaded as {name}." if saved and saved != name else ""
        raise CheckpointError(
            f"{where} lacks weights that {name} needs: {_listed(sorted(report['missing_keys']))}.{reason} "
            "They would be random."
        )


def _listed(names: list[str], at_most: int = 5) -> str:
    rest = len(names) - at_most
    return ", ".join(names[:at_most]) + (f" and {rest} more" if rest > 0 else "")

"""Fields that requests have and the server does not serve: which are harmless, and which would change the answer."""

import logging
import threading
from collections.abc import Iterator
from typing import Any

from orca_hf.server.errors import bad_request, shortened
from orca_hf.server.protocol import Fields

logger = logging.getLogger(__name__)

_MAX_NAMES = 64  # that are logged: a client can make up any number
_MAX_LENGTH = 64  # of a name, likewise

# Known names, with the values by which they ask for nothing beside what happens anyway, and what to do instead.
_NOTHING: tuple[Any, ...] = (False, "", [], {})
_LEAVE_OUT = "This server does not serve it. Leave it out"
_SCHEMA = f"{_LEAVE_OUT}, or give a JSON schema as response_format"
_TOOLS = "This server calls no tools. Leave it out"
_STOPS = f"{_LEAVE_OUT}, or stop at texts by stop"
_UNSERVED: dict[str, tuple[tuple[Any, ...], str]] = {
    "add_generation_prompt": ((True,), _LEAVE_OUT),
    "allowed_token_ids": (_NOTHING, f"{_LEAVE_OUT}, or use logit_bias"),
    "audio": (_NOTHING, "This model takes and gives text only. Leave it out"),
    "bad_words": (_NOTHING, f"{_LEAVE_OUT}, or use logit_bias"),
    "bad_words_ids": (_NOTHING, f"{_LEAVE_OUT}, or use logit_bias"),
    "chat_template": (_NOTHING, "The template is the model's own. Leave it out, or use /v1/completions"),
    "chat_template_kwargs": (_NOTHING, _LEAVE_OUT),
    "continue_final_message": (_NOTHING, f"{_LEAVE_OUT}, or use /v1/completions"),
    "do_sample": ((), "Say it by temperature, of which 0 is greedy"),
    "documents": (_NOTHING, f"{_LEAVE_OUT}, or write them into a message"),
    "function_call": ((*_NOTHING, "none", "auto"), _TOOLS),
    "functions": (_NOTHING, _TOOLS),
    "generation_config": (_NOTHING, f"{_LEAVE_OUT}, or give its options one by one"),
    "grammar": (_NOTHING, _SCHEMA),
    "guided_choice": (_NOTHING, _SCHEMA),
    "guided_grammar": (_NOTHING, _SCHEMA),
    "guided_json": (_NOTHING, _SCHEMA),
    "guided_regex": (_NOTHING, _SCHEMA),
    "include_stop_str_in_output": (_NOTHING, _LEAVE_OUT),
    "logits_processors": (_NOTHING, _LEAVE_OUT),
    "max_new_tokens": ((), "Its name is max_tokens here"),
    "max_output_tokens": ((), "Its name is max_tokens here"),
    "min_tokens": ((0,), _LEAVE_OUT),
    "mirostat": ((0,), _LEAVE_OUT),
    "modalities": ((*_NOTHING, ["text"]), "This model takes and gives text only. Leave it out, or say ['text']"),
    "num_beams": ((1,), "This server does not search with beams. Leave it out"),
    "prompt_logprobs": ((), f"{_LEAVE_OUT}, or use echo and logprobs of /v1/completions"),
    "reasoning_effort": (("none",), _LEAVE_OUT),
    "return_token_ids": (_NOTHING, f"{_LEAVE_OUT}, or ask /tokenize"),
    "return_tokens_as_token_ids": (_NOTHING, _LEAVE_OUT),
    "skip_special_tokens": ((True,), _LEAVE_OUT),
    "stop_token_ids": (_NOTHING, _STOPS),
    "structural_tag": (_NOTHING, _SCHEMA),
    "structured_outputs": (_NOTHING, _SCHEMA),
    "thinking": (_NOTHING, _LEAVE_OUT),
    "tool_calls": (_NOTHING, "This server takes no tool calls, not in earlier messages either. Write them as text"),
    "tool_choice": ((*_NOTHING, "none", "auto"), _TOOLS),
    "tools": (_NOTHING, _TOOLS),
    "truncate_prompt_tokens": ((), f"{_LEAVE_OUT}, and send a prompt that fits"),
    "typical_p": ((1,), _LEAVE_OUT),
    "use_beam_search": (_NOTHING, "This server does not search with beams. Leave it out"),
    "verbosity": (("medium",), _LEAVE_OUT),
    "vllm_xargs": (_NOTHING, _LEAVE_OUT),
    "web_search_options": ((), "This server searches nothing. Leave it out"),
}  # fmt: skip
# The same where it depends on what is asked for.
_UNSERVED_OF = {
    "ChatRequest": {
        "add_special_tokens": (_NOTHING, "The chat template writes special tokens. Leave it out"),
        "best_of": ((1,), f"{_LEAVE_OUT}, or ask for several answers by n"),
        "echo": (_NOTHING, f"{_LEAVE_OUT}, or use /v1/completions"),
        "prompt": (_NOTHING, "A chat has messages. Leave it out, or use /v1/completions"),
        "reasoning": (_NOTHING, _LEAVE_OUT),
        "suffix": (_NOTHING, _LEAVE_OUT),
    },
    "CompletionRequest": {
        "add_special_tokens": ((True,), f"{_LEAVE_OUT}, or give the prompt's token ids"),
        "max_completion_tokens": ((), "Its name is max_tokens in completions"),
        "messages": (_NOTHING, "A completion has a prompt. Leave it out, or use /v1/chat/completions"),
        "reasoning": (_NOTHING, _LEAVE_OUT),
    },
}

# Known, and without effect on what is answered: on a server with one model, no cache of answers and text only.
_HARMLESS = frozenset(
    {
        "annotations",
        "cache_control",
        "cache_salt",
        "early_stopping",
        "guided_decoding_backend",
        "id",
        "include_reasoning",
        "length_penalty",
        "mm_processor_kwargs",
        "parallel_tool_calls",
        "prediction",
        "priority",
        "prompt_cache_retention",
        "reasoning",
        "request_id",
        "spaces_between_special_tokens",
    }
)


class ExtraFields:
    """Judges the fields that requests have beside those that are served.

    Args:
        strict: Whether unknown ones are refused. Otherwise they are taken, and their names logged, once each.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._lock = threading.Lock()
        self._logged: set[str] = set()

    def check(self, request: Fields) -> None:
        """Looks at all of a request. May be called on any thread.

        Raises:
            ApiError: A field asks for what is not served, or is unknown and the server is strict.
        """
        unknown = []
        for place, name, value, owner in _extras(request):
            known = _UNSERVED_OF.get(owner, {}).get(name) or _UNSERVED.get(name)
            if known is not None:
                _refuse_unless_neutral(place, value, *known)
            elif name not in _HARMLESS:
                unknown.append((place, name))
        if unknown and self._strict:
            place = unknown[0][0]
            raise bad_request(f"Unrecognized request argument supplied: {place}", place, "unknown_parameter")
        for _, name in unknown:
            self._log(name)

    def _log(self, name: str) -> None:
        with self._lock:
            if name in self._logged or len(self._logged) >= _MAX_NAMES:
                return
            self._logged.add(name)
            is_last = len(self._logged) == _MAX_NAMES
        logger.warning(
            "Requests have a field %s, which is not known here and has no effect. --strict refuses such requests.%s",
            repr(name),  # a name with a line end would write lines of its own
            " Further names are not logged." if is_last else "",
        )


def _extras(fields: Fields, place: str = "") -> Iterator[tuple[str, str, Any, str]]:
    """Place, name and value of each field that is not served, and the name of the class that does not have it."""
    for name, value in (fields.model_extra or {}).items():
        shown = shortened(name, _MAX_LENGTH)
        yield place + shown, shown, value, type(fields).__name__
    for name in fields.model_fields_set.intersection(type(fields).model_fields):
        value = getattr(fields, name)
        if isinstance(value, Fields):
            yield from _extras(value, f"{place}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Fields):
            for i, each in enumerate(value):
                yield from _extras(each, f"{place}{name}[{i}].")


def _refuse_unless_neutral(place: str, value: Any, neutral: tuple[Any, ...], instead: str) -> None:
    if value not in neutral:
        raise bad_request(f"{place}: {instead}.", place, "unsupported_parameter")

"""Bodies of requests that are as long as a server takes them, and made to be long in the judging."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_TEXT = '{"prompt":"k","max_tokens":4,'
_MESSAGE = '{"messages":[{"role":"user","content":"k"}],"max_tokens":4,'
_SCHEMA = _MESSAGE + '"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":'

_FIELDS = _SCHEMA + '{"type":"object","properties":{'


@dataclass(frozen=True, slots=True)
class Hostile:
    """One of them.

    Attributes:
        name: What it is full of.
        path: Where it is sent.
        status: Of the answer that it should get.
        body: It.
    """

    name: str
    path: str
    status: int
    body: bytes


def hostile(size: int) -> Iterator[Hostile]:
    """All of them, of up to `size` bytes each, one by one: together they are large."""
    for (path, name), (status, make) in _MAKERS.items():
        yield Hostile(name, path, status, make(size).encode())


def names() -> list[tuple[str, str]]:
    """Where each is sent and what it is full of, in the order of `hostile`."""
    return list(_MAKERS)


def _filled(head: str, item: str, tail: str, separator: str = ",") -> Callable[[int], str]:
    def make(size: int) -> str:
        room = size - len(head) - len(tail)
        return head + separator.join([item] * (room // (len(item) + len(separator)))) + tail

    return make


def _numbered(head: str, item: str, tail: str, most: int | None = None) -> Callable[[int], str]:
    """Of items that differ, by a number of seven digits in each, and no more than `most`."""

    def make(size: int) -> str:
        number = (size - len(head) - len(tail)) // (len(item % 0) + 1)
        return head + ",".join(item % i for i in range(min(number, most or number))) + tail

    return make


def _nested(head: str, opening: str, closing: str, tail: str, depth: int | None = None) -> Callable[[int], str]:
    def make(size: int) -> str:
        number = depth or (size - len(head) - len(tail) - 4) // (len(opening) + len(closing))
        return head + opening * number + "true" + closing * number + tail

    return make


_MAKERS: dict[tuple[str, str], tuple[int, Callable[[int], str]]] = {
    (_COMPLETIONS, "negative tokens"): (400, _filled('{"prompt":[', "-1", "]}")),
    (_COMPLETIONS, "tokens"): (400, _filled('{"prompt":[', "1", "]}")),
    (_COMPLETIONS, "fractions"): (400, _filled('{"prompt":[', "1.5", "]}")),
    (_COMPLETIONS, "numbers of 4,000 digits"): (400, _filled('{"prompt":[', "1" * 4000, "]}")),
    (_COMPLETIONS, "prompts of one token"): (400, _filled('{"prompt":[', "[1]", "]}")),
    (_COMPLETIONS, "prompts of none"): (400, _filled('{"prompt":[', "[]", "]}")),
    (_COMPLETIONS, "prompts of text"): (400, _filled('{"prompt":[', '"k"', "]}")),
    (_COMPLETIONS, "numbers after a text"): (400, _filled('{"prompt":["k",', "1", "]}")),
    (_COMPLETIONS, "text"): (400, _filled('{"prompt":"', "k ", '"}', "")),
    (_COMPLETIONS, "one word"): (400, _filled('{"prompt":"', "k", '"}', "")),
    (_COMPLETIONS, "escapes"): (400, _filled('{"prompt":"', "\\u00e9", '"}', "")),
    (_COMPLETIONS, "backslashes"): (400, _filled('{"prompt":"', "\\\\", '"}', "")),
    (_COMPLETIONS, "unknown fields"): (400, _numbered(_TEXT, '"u%07d":0', "}")),
    (_COMPLETIONS, "60,000 unknown fields"): (200, _numbered(_TEXT, '"u%07d":0', "}", 60_000)),
    (_COMPLETIONS, "numbers of metadata"): (200, _filled(_TEXT + '"metadata":{"a":[', "1", "]}}")),
    (_COMPLETIONS, "lists of metadata"): (400, _filled(_TEXT + '"metadata":{"a":[', "[1]", "]}}")),
    (_COMPLETIONS, "objects of metadata"): (400, _filled(_TEXT + '"metadata":{"a":[', "{}", "]}}")),
    (_COMPLETIONS, "objects in objects"): (400, _nested(_TEXT + '"metadata":', '{"a":', "}", "}")),
    (_COMPLETIONS, "lists in lists"): (400, _nested(_TEXT + '"metadata":{"a":', "[", "]", "}}")),
    (_COMPLETIONS, "biases"): (400, _numbered(_TEXT + '"logit_bias":{', '"%07d":1', "}}")),
    (_COMPLETIONS, "30,000 wrong biases"): (400, _numbered(_TEXT + '"logit_bias":{', '"-%07d":999', "}}", 30_000)),
    (_COMPLETIONS, "stops"): (400, _filled(_TEXT + '"stop":[', '"a"', "]}")),
    (_COMPLETIONS, "stops that are numbers"): (400, _filled(_TEXT + '"stop":[', "1", "]}")),
    (_COMPLETIONS, "a long stop"): (400, _filled(_TEXT + '"stop":"', "a", '"}', "")),
    (_COMPLETIONS, "a model's name"): (400, _filled(_TEXT + '"model":"', "a", '"}', "")),
    (_COMPLETIONS, "a field's name"): (200, _filled(_TEXT + '"', "a", '":1}', "")),
    (_COMPLETIONS, "quotation marks"): (400, _filled("", '"', "", "")),
    (_COMPLETIONS, "brackets"): (400, _filled("", "[", "", "")),
    (_COMPLETIONS, "one number"): (400, _filled("", "1", "", "")),
    (_COMPLETIONS, "spaces"): (400, _filled("", " ", "", "")),
    (_CHAT, "messages that are numbers"): (400, _filled('{"messages":[', "0", "]}")),
    (_CHAT, "messages that are null"): (400, _filled('{"messages":[', "null", "]}")),
    (_CHAT, "messages that are empty"): (400, _filled('{"messages":[', "{}", "]}")),
    (_CHAT, "messages"): (400, _filled('{"messages":[', '{"role":"user","content":"k"}', "]}")),
    (_CHAT, "16,000 messages"): (400, _filled('{"messages":[', '{"role":"user","content":"' + "k" * 230 + '"}', "]}")),
    (_CHAT, "parts"): (400, _filled('{"messages":[{"role":"user","content":[', '{"type":"text","text":""}', "]}]}")),
    (_CHAT, "parts that are numbers"): (400, _filled('{"messages":[{"role":"user","content":[', "1", "]}]}")),
    (_CHAT, "a message"): (400, _filled('{"messages":[{"role":"user","content":"', "k ", '"}]}', "")),
    (_CHAT, "tools"): (400, _filled(_MESSAGE + '"tools":[', '{"type":"function"}', "]}")),
    (_CHAT, "tools that are numbers"): (400, _filled(_MESSAGE + '"tools":[', "1", "]}")),
    (_CHAT, "a schema of numbers"): (400, _numbered(_SCHEMA + '{"enum":[', "1%07d", "]}}}}")),
    (_CHAT, "a schema of texts"): (400, _numbered(_SCHEMA + '{"enum":[', '"%07d"', "]}}}}", 60_000)),
    (_CHAT, "a schema of 5,000 texts"): (200, _numbered(_SCHEMA + '{"enum":[', '"%07d"', "]}}}}", 5_000)),
    (_CHAT, "a schema's fields"): (400, _numbered(_FIELDS, '"%07d":{}', "}}}}}", 16_000)),
    (_CHAT, "400 of a schema's fields"): (200, _numbered(_FIELDS, '"%07d":{}', "}}}}}", 400)),
    (_CHAT, "patterns that are met at once"): (
        400,
        _numbered(_SCHEMA + '{"type":"string","allOf":[', '{"pattern":"a{%07d}"}', "]}}}}", 20),
    ),
    (_CHAT, "schemas in a schema"): (200, _nested(_SCHEMA, '{"type":"object","properties":{"a":', "}}", "}}}", 50)),
    (_CHAT, "a schema's pattern"): (400, _filled(_SCHEMA + '{"type":"string","pattern":"', "(a|b)", '"}}}}', "")),
    ("/tokenize", "text"): (400, _filled('{"prompt":"', "k ", '"}', "")),
    ("/tokenize", "messages"): (400, _filled('{"messages":[', '{"role":"user","content":"k"}', "]}")),
    ("/detokenize", "tokens"): (400, _filled('{"tokens":[', "1", "]}")),
    ("/detokenize", "negative tokens"): (400, _filled('{"tokens":[', "-1", "]}")),
}

"""What a soak sends: requests of all kinds, right and wrong. The same seed gives the same."""

import json
import random
from dataclasses import dataclass
from typing import Any

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_WORDS = ("the sea", " ok,", "naïve", "😀", "漢字", "\n", "  ", "e\u0301", "A train leaves at nine.", "{}", "\u2028")
_STOPS = ("e", "th", "a", "s", "é", "😀", "zz", "\n")

# Each with the status that it is to get.
_MALFORMED: tuple[tuple[str, bytes, int], ...] = (
    (COMPLETION, b"", 400),
    (COMPLETION, b"{", 400),
    (COMPLETION, b"[]", 400),
    (COMPLETION, b"[" * 100_000, 400),
    (COMPLETION, b'{"prompt": "\xff"}', 400),
    (COMPLETION, b'{"prompt": "\\ud800"}', 400),
    (COMPLETION, b'{"prompt": []}', 400),
    (COMPLETION, b'{"prompt": "a", "max_tokens": -1}', 400),
    (COMPLETION, b'{"prompt": "a", "max_tokens": 1000000000}', 400),
    (COMPLETION, b'{"prompt": "a", "temperature": NaN}', 400),
    (COMPLETION, b'{"prompt": [99999999]}', 400),
    (COMPLETION, b'{"prompt": "a", "logit_bias": {"99999999": 1}}', 400),
    (COMPLETION, b'{"prompt": "a", "best_of": 7, "stream": true}', 400),
    (COMPLETION, b'{"prompt": "a", "model": "another"}', 404),
    (CHAT, b'{"messages": []}', 400),
    (CHAT, b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', 400),
    (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "no_such_option": 1}', 400),
    (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}', 400),
)


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """One request.

    Attributes:
        path: Where to.
        body: JSON, or what claims to be it.
        status: What is to come back.
        stream: Whether the answer is to be streamed.
    """

    path: str
    body: bytes
    status: int = 200
    stream: bool = False

    @property
    def whole(self) -> "SoakRequest":
        """The same without a stream."""
        given = json.loads(self.body)
        given.pop("stream_options", None)
        return SoakRequest(self.path, json.dumps({**given, "stream": False}).encode(), self.status)


def malformed(rng: random.Random) -> SoakRequest:
    """A request that is to be refused."""
    return SoakRequest(*rng.choice(_MALFORMED))


def proper(rng: random.Random) -> SoakRequest:
    """A request that is to be answered, and the same way each time: what is sampled has a seed."""
    chat, stream = rng.random() < 0.4, rng.random() < 0.6
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 48), "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    body |= {"messages": _messages(rng)} if chat else {"prompt": _prompts(rng)}
    body |= _sampling(rng) if rng.random() < 0.5 else {"temperature": 0}
    optional: dict[str, Any] = {
        "stop": rng.sample(_STOPS, rng.randint(1, 3)),
        "n": rng.randint(2, 3),
        "presence_penalty": rng.uniform(-1, 1),
        "frequency_penalty": rng.uniform(-1, 1),
        "repetition_penalty": rng.uniform(0.8, 1.3),
        "logit_bias": {str(rng.randrange(3, 250)): rng.uniform(-5, 5)},
        "ignore_eos": True,
        **({"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2, "echo": True}),
    }
    wanted = [name for name in optional if rng.random() < (0.4 if name == "stop" else 0.15)]
    body |= {name: optional[name] for name in wanted if name != "top_logprobs" or "logprobs" in wanted}
    return SoakRequest(CHAT if chat else COMPLETION, json.dumps(body).encode(), stream=stream)


def _sampling(rng: random.Random) -> dict[str, Any]:
    options = {"top_p": rng.uniform(0.5, 1), "top_k": rng.randint(1, 50), "min_p": rng.uniform(0, 0.2)}
    wanted = [name for name in options if rng.random() < 0.3]
    # Hardly a seed twice: a draw on the edge between two tokens may fall either way by rounding.
    always = {"temperature": rng.uniform(0.5, 1.5), "seed": rng.randrange(2**31)}
    return {**always, **{name: options[name] for name in wanted}}


def _text(rng: random.Random) -> str:
    return "".join(rng.choices(_WORDS, k=rng.randint(1, 8)))


def _messages(rng: random.Random) -> list[dict[str, str]]:
    roles = ["system", "user"][rng.randrange(2) :]
    return [{"role": role, "content": _text(rng)} for role in roles]


def _prompts(rng: random.Random) -> Any:
    tokens = [rng.randrange(3, 250) for _ in range(rng.randint(1, 60))]
    return rng.choice([_text(rng), _text(rng), tokens, [_text(rng), _text(rng)]])

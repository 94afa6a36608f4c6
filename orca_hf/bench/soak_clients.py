"""The clients of a soak: some read their answer, some leave, and some send what is to be refused."""

import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from orca_hf.bench.soak_requests import SoakRequest, malformed
from orca_hf.errors import OrcaError

PATIENCE = 60  # seconds after which an answer counts as one that never comes
_LEAVING, _MALFORMED = 0.2, 0.05  # shares of all requests
_TOLERANCE = 1e-3  # of log-probabilities: their last digits depend on who else is in the batch
Answer = dict[str, Any]


class AnswerError(OrcaError):
    """A response that is not what it was to be; says how."""


class Clients:
    """Sends requests to one server, and looks at what comes back.

    Args:
        url: The server's.
        rng: Of arrivals, and of who leaves when.

    Attributes:
        outcomes: How requests have ended: "answered", "left", "malformed" (and refused), "busy" (429), "broken".
        broken: What was wrong with those that are, in words.
    """

    def __init__(self, url: str, rng: random.Random) -> None:
        self._url = url
        self._rng = rng
        self.outcomes: Counter[str] = Counter()
        self.broken: list[str] = []

    async def alone(self, requests: Sequence[SoakRequest], ended: Callable[[], object]) -> list[Answer]:
        """The whole answer to each, one request after the other."""
        answers = []
        async with self._client() as client:
            for request in requests:
                response = await _post(client, request.whole)
                answers.append(_answer([response.json()]))
                ended()
        return answers

    async def arrive(
        self, work: Sequence[tuple[SoakRequest, Answer]], count: int, rate: float, ended: Callable[[], object]
    ) -> None:
        """Sends `count` requests, at random times and whether or not others are answered.

        Args:
            work: Requests to draw from, each with its answer.
            count: How many to send.
            rate: Of a Poisson process, in requests a second.
            ended: Called after each.
        """
        async with self._client() as client:
            tasks = []
            for _ in range(count):
                await asyncio.sleep(self._rng.expovariate(rate))
                tasks.append(asyncio.create_task(self._one(client, *self._drawn(work))))
                tasks[-1].add_done_callback(lambda _: ended())
            await asyncio.gather(*tasks)

    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        headers = {"Content-Type": "application/json"}
        return httpx.AsyncClient(base_url=self._url, limits=limits, timeout=PATIENCE, headers=headers)

    def _drawn(self, work: Sequence[tuple[SoakRequest, Answer]]) -> tuple[SoakRequest, Answer, float | None]:
        """A request, its answer, and after which share of that its client leaves; None for not at all."""
        fate = self._rng.random()
        if fate < _MALFORMED:
            return malformed(self._rng), {}, None
        request, expected = self._rng.choice(work)
        return request, expected, self._rng.random() if fate < _MALFORMED + _LEAVING else None

    async def _one(
        self, client: httpx.AsyncClient, request: SoakRequest, expected: Answer, leaves: float | None
    ) -> None:
        try:
            outcome = await self._outcome(client, request, expected, leaves)
        except (AnswerError, httpx.HTTPError, ValueError) as error:
            outcome = "broken"
            self.broken.append(f"{error!r} {request.path} {request.body[:500]!r}")
        self.outcomes[outcome] += 1

    async def _outcome(
        self, client: httpx.AsyncClient, request: SoakRequest, expected: Answer, leaves: float | None
    ) -> str:
        if request.stream:
            found = await _streamed(client, request, None if leaves is None else math.ceil(20 * leaves))
        elif leaves is None:
            found = await _whole(client, request)
        else:
            try:
                found = await asyncio.wait_for(_whole(client, request), 0.1 * leaves)
            except asyncio.TimeoutError:
                return "left"
        if isinstance(found, str):
            return found
        if not _same(found, expected):
            raise AnswerError(f"{found} instead of {expected}")
        return "answered"


async def _post(client: httpx.AsyncClient, request: SoakRequest) -> httpx.Response:
    return await client.post(request.path, content=request.body)


async def _whole(client: httpx.AsyncClient, request: SoakRequest) -> Answer | str:
    response = await _post(client, request)
    if response.status_code == 429:
        return "busy"
    if response.status_code != request.status:
        raise AnswerError(f"{response.status_code} instead of {request.status}: {response.text[:500]}")
    return _answer([response.json()]) if request.status == 200 else "malformed"


async def _streamed(client: httpx.AsyncClient, request: SoakRequest, leaves_after: int | None) -> Answer | str:
    async with client.stream("POST", request.path, content=request.body) as response:
        if response.status_code == 429:
            return "busy"
        if response.status_code != request.status:
            raise AnswerError(f"{response.status_code} instead of {request.status}")
        chunks: list[dict[str, Any]] = []
        is_whole = False
        async for line in response.aiter_lines():
            if leaves_after is not None and len(chunks) >= leaves_after:
                return "left"
            data = line.removeprefix("data: ")
            is_whole = data == "[DONE]" or (is_whole and not data)
            if data and not is_whole:
                chunks.append(json.loads(data))
    if not is_whole:
        raise AnswerError("a stream without its end")
    return _answer(chunks)


def _answer(chunks: Sequence[dict[str, Any]]) -> Answer:
    """What a whole answer, or the chunks of one, say: choices by their index, and usage.

    Raises:
        AnswerError: An error is among them.
    """
    choices: dict[int, Any] = {}
    usage = None
    for chunk in chunks:
        if "error" in chunk:
            raise AnswerError(f"an error in the answer: {chunk['error']}")
        for choice in chunk["choices"]:
            said = {name: value for name, value in choice.items() if name not in ("index", "message", "delta")}
            said["message"] = choice.get("message") or choice.get("delta")
            choices[choice["index"]] = _joined(choices.get(choice["index"]), said)
        usage = chunk.get("usage") or usage
    return {"choices": choices, "usage": usage}


def _joined(before: Any, after: Any) -> Any:
    if before is None or after is None:
        return before if after is None else after
    if isinstance(before, dict):
        return {name: _joined(before.get(name), after.get(name)) for name in before | after}
    return before + after


def _same(found: Any, expected: Any) -> bool:
    """Equal, but for the last digits of numbers, and for names that stand for nothing."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return all(_same(found.get(name), expected.get(name)) for name in found | expected)
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(_same, found, expected))
    if isinstance(found, float) and isinstance(expected, float):
        return math.isclose(found, expected, abs_tol=_TOLERANCE)
    return bool(found == expected)

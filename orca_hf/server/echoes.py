"""Prompts as answers begin with them, where a request says `echo`."""

from collections.abc import Sequence
from dataclasses import replace

from orca_hf.server.answers import Answers, Piece
from orca_hf.server.logprobs import as_logprob
from orca_hf.server.options import Options
from orca_hf.server.prompts import completion_prompts
from orca_hf.server.protocol import CompletionRequest
from orca_hf.server.service import Call, Service

_SIZE = 64  # tokens in a piece


async def echoes(
    service: Service, call: Call, request: CompletionRequest, options: Options, answers: Answers
) -> list[Piece]:
    """The prompts before their answers, in pieces, which a stream can write between others.

    With log-probabilities they are the text that the prompt's tokens make, so that each token has its place in it.
    """
    pieces: list[Piece] = []
    for number, (given, _) in enumerate(completion_prompts(request)):
        same = answers.answers[number * options.num_answers : (number + 1) * options.num_answers]
        prompt = same[0].prompt
        if options.logprobs is not None:
            echoed = await _with_logprobs(service, call, prompt, options.logprobs)
        elif isinstance(given, str):
            echoed = [Piece(0, given, ())]
        else:
            echoed = [Piece(0, await call.run(service.decoder.decode, prompt), ())]
        for answer in same:
            answer.begins_at = sum(len(piece.text) for piece in echoed)
            pieces += [replace(piece, index=answer.index) for piece in echoed]
    return pieces


async def _with_logprobs(service: Service, call: Call, prompt: Sequence[int], num_top: int) -> list[Piece]:
    text, begins = await call.run(service.decoder.text_and_begins, prompt)
    looked = await call.look(service.engine.prompt_logprobs, prompt, num_top)
    entries = [as_logprob(*each) for each in zip(prompt, looked, begins, strict=True)]
    # The text of the tokens before the first that has any is the first piece's.
    cuts = [0, *begins[_SIZE::_SIZE], len(text)]
    return [
        Piece(0, text[cuts[i] : cuts[i + 1]], (), tuple(entries[start : start + _SIZE]))
        for i, start in enumerate(range(0, len(prompt), _SIZE))
    ]

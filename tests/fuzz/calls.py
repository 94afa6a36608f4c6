"""Random calls of generate(), with code of the user's in them that writes, draws, and remembers what it sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from drawn_options import MANY, drawn_call
from tiny import VOCAB, pad_left
from tokenizers_tiny import byte_level
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

TOKENIZER = byte_level()
RECORDED = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


class Streamer(BaseStreamer):
    """Remembers what it is given, and may draw a random number each time."""

    def __init__(self, seen: list[Any], draws: bool) -> None:
        self.seen = seen
        self.draws = draws

    def put(self, value: Tensor) -> None:
        self.seen.append((value.tolist(), torch.rand(1).item() if self.draws else None))

    def end(self) -> None:
        self.seen.append("end")


class Processor(LogitsProcessor):
    """Does `act` to tokens and scores, and remembers what it was shown."""

    def __init__(self, seen: list[Any], act: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.seen = seen
        self.act = act

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append((input_ids.tolist(), tuple(scores.shape), scores.dtype))
        return self.act(input_ids, scores)


class Criterion(StoppingCriteria):
    """Ends rows by `judge`, and remembers what it was shown."""

    def __init__(self, seen: list[Any], judge: Callable[[Tensor], Any]) -> None:
        self.seen = seen
        self.judge = judge

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Any:
        self.seen.append(input_ids.tolist())
        return self.judge(input_ids)


def _write_tokens(input_ids: Tensor, scores: Tensor) -> Tensor:
    input_ids[:, 0] = input_ids[:, -1]
    return scores


def _write_scores(input_ids: Tensor, scores: Tensor) -> Tensor:
    scores[:, ::3] = -50.0
    return scores


def _draw(input_ids: Tensor, scores: Tensor) -> Tensor:
    return scores - torch.rand_like(scores).log().neg().log()


PROCESSORS = {
    "rolls": lambda input_ids, scores: scores.roll(input_ids.shape[1], dims=-1),
    "looks": lambda input_ids, scores: scores,
    "writes tokens": _write_tokens,
    "writes scores": _write_scores,
    "draws": _draw,
    "raises": lambda input_ids, scores: scores / (1 if input_ids.shape[1] % 9 else 1 // 0),
}
DRAWING = {"draws"}
CRITERIA = {
    "by the last token": lambda ids: ids[:, -1] % 3 == 0,
    "in a column": lambda ids: ids[:, -1:] % 5 == 0,
    "all by the first row": lambda ids: (ids[0, -1] % 5 == 0).repeat(len(ids)),
    "a Python bool": lambda ids: ids.shape[1] > 14,
}


def _prompts(draw: Random, *, may_pad: bool) -> list[list[int]]:
    """Some of random tokens, some that repeat, so that guesses come true."""
    rows = draw.choice([1, 1, 2, 3, 5])
    kinds = [draw.random() < 0.3 for _ in range(rows)]
    lengths = [draw.randrange(1, 14) for _ in range(rows)]
    lengths = lengths if may_pad else [lengths[0]] * rows
    return [
        ([draw.randrange(3, VOCAB)] * length) if repeats else [draw.randrange(3, VOCAB) for _ in range(length)]
        for repeats, length in zip(kinds, lengths, strict=True)
    ]


def _padded(draw: Random, *, may_pad: bool) -> dict[str, Any]:
    batch = pad_left(_prompts(draw, may_pad=may_pad))
    if may_pad and draw.random() < 0.3:
        missing = -batch["input_ids"].shape[1] % draw.choice([8, 16])
        batch = {name: torch.nn.functional.pad(tensor, (missing, 0)) for name, tensor in batch.items()}
    if bool(batch["attention_mask"].all()) and draw.random() < 0.5:
        del batch["attention_mask"]
    if draw.random() < 0.1:
        batch["input_ids"] = batch["input_ids"].to(torch.int32)
    return batch


@dataclass
class DrawnCall:
    """Arguments of one call, and what code of the user's in them has seen."""

    arguments: dict[str, Any]
    said: list[str]
    seen: list[Any] = field(default_factory=list)
    writes: bool = False  # whether code of the user's writes into the tokens that it is shown

    @property
    def width(self) -> int:
        """Tokens of the longest prompt, padding included."""
        return int(self.arguments["input_ids"].shape[1])

    @property
    def mask(self) -> Tensor:
        """(num_rows, width)."""
        mask = self.arguments.get("attention_mask")
        return torch.ones_like(self.arguments["input_ids"]) if mask is None else mask

    def ends(self, model: PreTrainedModel) -> frozenset[int]:
        """The tokens that end a row of `model`'s."""
        ends = self.arguments.get("eos_token_id", model.generation_config.eos_token_id)
        return frozenset([] if ends is None else ends if isinstance(ends, list) else [ends])

    def run(self, model: PreTrainedModel, **more: Any) -> Any:
        """The call: its result."""
        return model.generate(**{**self.arguments, **more})

    def run_and_record(self, model: PreTrainedModel) -> tuple[Any, list[Any]]:
        """The call: its result, and what the user's code has seen, the prompts after the call last."""
        result = self.run(model)
        # Natively what a processor writes at the first step goes into the caller's own tensor; by Orca into a copy.
        prompts = None if self.writes else self.arguments["input_ids"].tolist()
        return result, [*self.seen, prompts]

    def describe(self) -> str:
        """The arguments in one line."""
        plain = {
            name: value.tolist() if isinstance(value, Tensor) else value
            for name, value in self.arguments.items()
            if name not in ("tokenizer", "streamer", "logits_processor", "stopping_criteria")
        }
        return ", ".join([*(f"{name}={value!r}" for name, value in plain.items()), *self.said])

    @classmethod
    def plain(cls, draw: Random, num_tokens: int, *, may_pad: bool = True) -> DrawnCall:
        """A greedy call without anything else."""
        return cls({**_padded(draw, may_pad=may_pad), "max_new_tokens": num_tokens, "do_sample": False}, [])

    @classmethod
    def draw(cls, draw: Random, *, is_exact: bool, may_draw: bool, has_words: bool, may_pad: bool) -> DrawnCall:
        """A random call.

        Args:
            draw: Where from; calls drawn from equal generators are equal.
            is_exact: Whether tokens will be compared one by one. If not, only options whose tokens can be judged by
                the model's logits alone are drawn.
            may_draw: Whether it may use random numbers.
            has_words: Whether every token is one of the tiny tokenizer's.
            may_pad: Whether rows may be of different lengths.
        """
        call = cls.plain(draw, draw.choice([1, 3, 8, 12, 20, 40]), may_pad=may_pad)
        if is_exact and may_pad and draw.random() < 0.3:
            return cls._of_many_options(draw, may_draw=may_draw)
        options = call.arguments
        if draw.random() < 0.4:
            options["eos_token_id"] = draw.choice([33, MANY, draw.sample(range(3, VOCAB), 20)])
        if draw.random() < 0.4:
            options.update(RECORDED if draw.random() < 0.5 else {"return_dict_in_generate": True})
        if not is_exact:
            return call
        if may_draw and draw.random() < 0.35:
            options.update(do_sample=True, temperature=draw.choice([0.3, 1.0, 2.0]), top_k=draw.choice([0, 5, 50]))
            if draw.random() < 0.4:
                options["num_return_sequences"] = draw.choice([2, 3])
        if draw.random() < 0.15:
            options["repetition_penalty"] = draw.choice([0.8, 1.3])
        if has_words and draw.random() < 0.1:
            options.update(stop_strings=draw.sample(["ok", "x", "st", "no", "漢"], 2), tokenizer=TOKENIZER)
        if draw.random() < 0.25:
            name = draw.choice(sorted(PROCESSORS if may_draw else PROCESSORS.keys() - DRAWING))
            options["logits_processor"] = [Processor(call.seen, PROCESSORS[name])]
            call.said.append(f"a processor that {name}")
            call.writes = name == "writes tokens"
        if draw.random() < 0.2:
            name = draw.choice(sorted(CRITERIA))
            options["stopping_criteria"] = [Criterion(call.seen, CRITERIA[name])]
            call.said.append(f"a criterion that ends rows {name}")
        if draw.random() < 0.25:
            draws = may_draw and draw.random() < 0.3
            options["streamer"] = Streamer(call.seen, draws)
            call.said.append("a streamer that draws" if draws else "a streamer")
        return call

    @classmethod
    def _of_many_options(cls, draw: Random, *, may_draw: bool) -> DrawnCall:
        drawn = drawn_call(draw)
        if not may_draw:
            drawn["do_sample"] = False
        return cls(drawn, [name for name in ("logits_processor", "stopping_criteria") if name in drawn])

"""What a case does, step by step: calls, edits, scopes, threads, interrupts.

Each has a number of its own, from which all its details are drawn: so leaving one out changes no other.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from threading import Event, Thread
from typing import Any

import torch
from fuzz.calls import DrawnCall
from fuzz.edits import EDITS, NothingToEditError
from fuzz.interrupts import Lines
from fuzz.scopes import SCOPES, autocast
from fuzz.world import HangError, MismatchError, World
from oracle import Outcome, outcome
from transformers import LogitsProcessor

import orca_hf
from orca_hf import OrcaConfig
from orca_hf.runner import CACHE_FIELD

# Longer than anything here takes on a busy machine: who is not back by then waits for ever.
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Operation(ABC):
    """One step of a case."""

    number: int

    @abstractmethod
    def run(self, world: World) -> None:
        """Do it to both twins, and compare."""


class Call(Operation):
    """A call."""

    def run(self, world: World) -> None:
        world.run(world.draw_call(self.number), self.number)


class Turn(Operation):
    """A second turn on the cache that an earlier call has returned."""

    def run(self, world: World) -> None:
        if world.turn is None:
            return
        native, ours = world.turn
        world.turn = None  # a cache grows with its turn
        draw = Random(self.number)
        asked = [draw.randrange(3, 97) for _ in range(draw.randrange(1, 4))]
        world.log.append(f"    with the returned cache, and {asked} after its tokens")
        outcomes = []
        for model, (tokens, cache) in zip(world.twins, (native, ours), strict=True):
            ids = torch.cat([tokens, torch.tensor([asked] * len(tokens), dtype=tokens.dtype)], dim=1)
            whole = DrawnCall({"input_ids": ids, "max_new_tokens": 4, "do_sample": False}, [])
            call = DrawnCall({**whole.arguments, CACHE_FIELD: cache}, [])
            outcomes.append(outcome(lambda call=call, model=model: call.run_and_record(model)))
        if world.is_exact:
            world.compare(lambda: whole, *outcomes)


class Edit(Operation):
    """One of the edits; taken back by an `Undo`, if it is one of those."""

    def run(self, world: World) -> None:
        edit = Random(self.number).choice(EDITS)
        undo: list[Callable[[], object]] = []

        def change(model: Any) -> str:
            try:
                said, back = edit(model, Random(self.number + 1))
            except NothingToEditError:
                return "not for this model"
            if back is not None:
                undo.append(back)
            return said

        world.edit(edit.__name__, change)
        if undo:
            world.undo.append((edit.__name__, lambda: [back() for back in undo]))


class Undo(Operation):
    """The last edit that can be taken back is."""

    def run(self, world: World) -> None:
        if world.undo:
            name, undo = world.undo.pop()
            undo()
            world.log.append(f"    {name} is taken back")


class Scope(Operation):
    """Two calls while something is changed around them."""

    def run(self, world: World) -> None:
        draw = Random(self.number)
        scope = draw.choice(SCOPES)
        found = scope(world.ours, draw)
        if found is None:
            return
        said, manager = found
        world.log.append(f"    within {said}:")
        world.rounded = scope is autocast
        try:
            with manager:
                for number in range(draw.randrange(1, 3)):
                    world.run(world.draw_call(self.number + number), self.number)
        finally:
            world.rounded = False


class Crowd(Operation):
    """Calls of several threads at the same time. They draw nothing: natively, too, they would draw from one another."""

    def run(self, world: World) -> None:
        if world.native.training:  # dropout draws
            return
        draw = Random(self.number)
        calls = [world.draw_call(self.number + i, may_draw=False) for i in range(draw.randrange(2, 5))]
        world.log += ["    from threads at the same time:", *(f"      {call().describe()}" for call in calls)]
        native = [outcome(lambda call=call: call().run_and_record(world.native)) for call in calls]
        threads = [_Background(lambda call=call: call().run_and_record(world.ours)) for call in calls]
        results = [thread.result() for thread in threads]  # all of them: none is to run on into another operation
        for call, expected, result in zip(calls, native, results, strict=True):
            # They share the default generator's state with those that seed, so its next number says nothing here.
            world.compare(call, expected, Outcome(result, expected.next_random))


class Inside(Operation):
    """An edit from inside a processor of a running call, and the call of another thread after it."""

    def run(self, world: World) -> None:
        if world.native.training:  # dropout draws
            return
        edit, edited = Edit(self.number), Event()
        call = world.draw_call(self.number, may_draw=False)
        make_long = world.plain_call(self.number, 40)
        long = make_long()
        if isinstance(outcome(lambda: make_long().run(world.native)).result, Exception):
            return  # experts in float64, for instance
        world.log.append(f"    while {long.describe()} runs:")

        class Edits(LogitsProcessor):
            calls = 0

            def __call__(self, input_ids: Any, scores: Any) -> Any:
                self.calls += 1
                if self.calls == 3:
                    edit.run(world)
                    edited.set()
                return scores

        # What becomes of the call itself is not said anywhere: its next tokens may come of the old weights or the new.
        running = _Background(lambda: long.run(world.ours, logits_processor=[Edits()]))
        if not edited.wait(PATIENCE_S):
            raise HangError(f"the call does not come to its third token: {running.result()!r}")
        joining = _Background(lambda: call().run_and_record(world.ours))
        world.log.append(f"    then, beside it, {call().describe()}")
        expected = outcome(lambda: call().run_and_record(world.native))
        result, _ = joining.result(), running.result()
        if not world.native.training:
            world.compare(call, expected, Outcome(result, expected.next_random))


class Interrupt(Operation):
    """A call that is interrupted at some line of the library; alone, or while threads wait for it to drive them."""

    def run(self, world: World) -> None:
        draw = Random(self.number)
        call = world.draw_call(self.number)
        counting = Lines()
        with counting.counted():
            outcome(lambda: call().run_and_record(world.ours), self.number)
        if not counting.num_lines:
            return
        # Of others' calls only plain greedy ones are sure to go on (README, "Ctrl-C").
        numbers = [self.number + 1 + i for i in range(0 if world.native.training else draw.choice([0, 0, 2]))]
        beside = [world.plain_call(number, 20) for number in numbers]
        native = [outcome(lambda each=each: each().run_and_record(world.native)) for each in beside]
        threads = [_Background(lambda each=each: each().run_and_record(world.ours)) for each in beside]
        lines = Lines(raise_at=draw.randrange(counting.num_lines) + 1)
        is_told = False
        try:
            with lines.counted():
                outcome(lambda: call().run_and_record(world.ours), self.number)
        except KeyboardInterrupt:
            is_told = True
        world.log.append(
            f"    {call().describe()}, interrupted at line {lines.raise_at}, {lines.where or 'not reached'}"
        )
        world.log += [f"      beside {each().describe()}" for each in beside]
        results = [thread.result() for thread in threads]
        if lines.where and not is_told:
            raise MismatchError("nobody is told of the interruption")
        for each, expected, result in zip(beside, native, results, strict=True):
            world.compare(each, expected, Outcome(result, expected.next_random))


class Rewrap(Operation):
    """The wrapping changes: other settings, memory given back, unwrapped and wrapped again, copied, pickled."""

    def run(self, world: World) -> None:
        draw = Random(self.number)
        how = draw.choice(["config", "release", "unwrap", "deepcopy", "pickle"])
        if how == "config":
            world.config = draw_config(draw)
            orca_hf.wrap(world.ours, world.config)
        elif how == "release":
            orca_hf.release(world.ours)
        elif how == "unwrap":
            orca_hf.unwrap(world.ours)
            assert not orca_hf.is_wrapped(world.ours)
            orca_hf.wrap(world.ours, world.config)
        elif world.undo:
            return  # what an edit has hung into the model may be impossible to copy
        elif how == "deepcopy":
            world.copy()
        else:
            world.native, world.ours = pickle.loads(pickle.dumps(world.native)), pickle.loads(pickle.dumps(world.ours))
        world.log.append(f"    wrapping: {how} {world.config if how == 'config' else ''}")


class _Background:
    """A call in a thread of its own, which nobody waits for at exit."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._result: list[Any] = []
        self._call = call
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result.append(self._call())
        except BaseException as error:
            self._result.append(error)

    def result(self) -> Any:
        """What it has returned or raised.

        Raises:
            HangError: It does not.
        """
        self._thread.join(PATIENCE_S)
        if not self._result:
            raise HangError(f"a thread's call has not come back after {PATIENCE_S:.0f} s")
        return self._result[0]


def draw_config(draw: Random) -> OrcaConfig:
    """Settings under which rows wait for each other, prompts are cut, and everything else that there is."""
    size = draw.choice([1, 2, 3, 8, 32])
    return OrcaConfig(
        max_batch_size=size,
        max_batch_tokens=draw.choice([None, size, size + 4, 64, 512]) if size <= 32 else None,
        max_slots=draw.choice([192, 1024, 2048]),
        block_size=draw.choice([1, 4, 16]),
        pack_weights=draw.random() < 0.8,
        deterministic=draw.random() < 0.15,
        num_speculative_tokens=draw.choice([None, None, 0, 1, 4]),
        free_when_idle=draw.random() < 0.15,
    )


OPERATIONS = {Call: 8, Turn: 1, Edit: 6, Undo: 2, Scope: 3, Crowd: 2, Inside: 1, Interrupt: 2, Rewrap: 1}

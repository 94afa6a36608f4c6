"""One case of the fuzzer: made from a seed, run, and made smaller where it fails."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, replace
from random import Random
from unittest.mock import patch

import torch
from fuzz.operations import OPERATIONS, Call, Operation, draw_config
from fuzz.world import HangError, MismatchError, ModelSpec, World, can_be_wide
from tiny import ARCHITECTURES

from orca_hf import OrcaConfig


@dataclass(frozen=True)
class Case:
    """A model, settings, and what is done."""

    seed: int
    spec: ModelSpec
    config: OrcaConfig
    operations: tuple[Operation, ...]
    kept: tuple[int, ...]  # the operations that are run

    @classmethod
    def of(cls, seed: int) -> Case:
        """The case of a seed: always the same, but for who comes first among threads."""
        draw = Random(seed)
        architecture = "llama" if draw.random() < 0.35 else draw.choice(sorted(ARCHITECTURES))
        spec = ModelSpec(
            architecture,
            wide=can_be_wide(architecture) and draw.random() < 0.4,
            dtype=draw.choice([torch.float32] * 6 + [torch.float64, torch.bfloat16]),
            attention=draw.choice(["sdpa", "sdpa", "eager"]),
        )
        kinds = draw.choices(list(OPERATIONS), list(OPERATIONS.values()), k=draw.randrange(3, 9))
        # Every case ends with a call, which sees what the others have left.
        operations = tuple(kind(draw.randrange(2**31)) for kind in [*kinds, Call])
        return cls(seed, spec, draw_config(draw), operations, tuple(range(len(operations))))

    def without(self, index: int) -> Case:
        """The case less one operation."""
        return replace(self, kept=tuple(kept for kept in self.kept if kept != index))


@dataclass(frozen=True)
class Report:
    """What came of a case.

    Attributes:
        case: The case.
        fault: What is not as natively; None if everything is.
        script: What it did, line by line.
        num_calls: Calls of the wrapped model.
        num_by_orca: Those that Orca ran.
        num_near_ties: Calls that differ from native's in tokens that native can hardly tell apart.
        hangs: Whether a thread of this process is lost.
    """

    case: Case
    fault: str | None
    script: str
    num_calls: int = 0
    num_by_orca: int = 0
    num_near_ties: int = 0
    hangs: bool = False


def run_case(case: Case) -> Report:
    """Run a case in this process."""
    world = None
    fault, hangs = None, False
    with patch("orca_hf.packed_linear._MIN_ELEMENTS", 1):  # by size alone no tiny model's weights would be packed
        try:
            world = World(case.spec, case.config)
            for index in case.kept:
                operation = case.operations[index]
                world.log.append(f"  {index} {type(operation).__name__} {operation.number}")
                operation.run(world)
                world.check_rest()
        except MismatchError as mismatch:
            fault, hangs = str(mismatch), isinstance(mismatch, HangError)
        except BaseException:
            fault = traceback.format_exc()
    only = "" if len(case.kept) == len(case.operations) else f" --only {','.join(map(str, case.kept))}"
    lines = [f"python -m tests.fuzz --seed {case.seed}{only}", f"  {case.spec}, {case.config}"]
    script = "\n".join([*lines, *(world.log if world else [])])
    if world is None:
        return Report(case, fault, script)
    return Report(case, fault, script, world.num_calls, world.num_by_orca, world.num_near_ties, hangs)

"""Promise: bad input gets native's error or a clear one, and nothing is lost."""

import pytest
import torch
from oracle import assert_same
from tiny import PROMPTS, VOCAB, make_model, pad_left
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import orca_hf
from orca_hf import CapacityError, OrcaConfig, TokenIdError


@pytest.fixture(scope="module")
def twins():
    config = OrcaConfig(max_batch_size=2, max_batch_tokens=8, max_slots=64, block_size=8)
    return make_model(), orca_hf.wrap(make_model(), config)


def outcome(call):
    torch.manual_seed(0)
    try:
        return call()
    except Exception as error:
        return error


CASES = {
    "empty prompt": {"input_ids": torch.zeros((1, 0), dtype=torch.long)},
    "no rows": {"input_ids": torch.zeros((0, 3), dtype=torch.long)},
    "token id too large": {"input_ids": torch.tensor([[5, VOCAB]])},
    "token id negative": {"input_ids": torch.tensor([[5, -3]])},
    "a bad row among good ones": {"input_ids": torch.tensor([[5, 6], [7, 99999], [8, 9]])},
    "max_new_tokens 0": {"max_new_tokens": 0},
    "max_new_tokens negative": {"max_new_tokens": -1},
    "max_length below the prompt": {"max_new_tokens": None, "max_length": 2},
    "mask too short": {"attention_mask": torch.ones(1, 3)},
    "mask too long": {"attention_mask": torch.ones(1, 30)},
    "mask with other rows": {"attention_mask": torch.ones(2, 11)},
    "mask of one dimension": {"attention_mask": torch.ones(11)},
    "mask of four dimensions": {"attention_mask": torch.ones(1, 1, 11, 11)},
    "mask with holes": {"attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1]])},
    "mask of other values": {"attention_mask": torch.tensor([[3] * 11])},
    "another device": {"input_ids": torch.zeros((1, 3), dtype=torch.long, device="meta")},
    "float ids": {"input_ids": torch.tensor([[5.0, 6.0]])},
    "pad outside the vocabulary": {**pad_left(PROMPTS), "pad_token_id": VOCAB, "eos_token_id": list(range(3, 60))},
    "16-bit ids": {"input_ids": torch.tensor([[5, 6]], dtype=torch.int16)},
    "temperature 0": {"do_sample": True, "temperature": 0.0},
    "top_p 2": {"do_sample": True, "top_p": 2.0},
    "unknown argument": {"no_such_argument": 3},
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_answered_as_natively(twins, name):
    made = {"input_ids": torch.tensor([PROMPTS[0]]), "max_new_tokens": 4, "do_sample": False, **CASES[name]}
    native, ours = (outcome(lambda model=model: model.generate(**made)) for model in twins)
    if isinstance(native, Exception):
        assert isinstance(ours, type(native)), (ours, native)
    else:
        assert torch.equal(ours, native)
    good = {**pad_left(PROMPTS), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(twins[1].generate(**good), twins[0].generate(**good)), "the next call is served"
    assert twins[1].generate.engines[0].stats.num_reserved == 0


def test_a_token_id_outside_the_vocabulary_is_named(twins):
    with pytest.raises(TokenIdError, match=r"Row 1 has token id 99999.*0 to 96"):
        twins[1].generate(torch.tensor([[5, 6], [7, 99999]]), max_new_tokens=2)


@pytest.mark.parametrize("token", [-100, -1, VOCAB, 5000])
@pytest.mark.parametrize("masked", [True, False])
def test_a_token_that_the_model_does_not_have_is_an_error_at_padding_too(twins, token, masked):
    made = {
        "input_ids": torch.tensor([[5, 6, 7], [token, 8, 9]]),
        "attention_mask": torch.tensor([[1, 1, 1], [0 if masked else 1, 1, 1]]),
        "max_new_tokens": 2,
    }
    for model in twins:
        with pytest.raises(IndexError):
            model.generate(**made)
    assert twins[1].generate.engines[0].stats.num_waiting == 0


@pytest.mark.parametrize("rows", [1, len(PROMPTS)])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "mpt", "gpt_neo"])
def test_where_natively_padding_makes_nan_so_it_is_here(model_type, implementation, rows):
    plain, model = (make_model(model_type).to(torch.float64) for _ in range(2))
    for each in (plain, model):
        if model_type in ("llama", "gemma3_text"):
            each.set_attn_implementation(implementation)
    orca_hf.wrap(model)
    made = {**pad_left(PROMPTS[:rows]), "max_new_tokens": 4, "do_sample": False}
    assert_same(plain.generate(**made), model.generate(**made))
    if rows == 1:
        assert orca_hf.explain(model, **made).runs_by == "orca"


def test_a_request_over_the_pool_is_refused_with_the_numbers(twins):
    with pytest.raises(CapacityError, match=r"prompt 11 \+ max_new_tokens 90 needs 100 slots, the pool has 64"):
        twins[1].generate(torch.tensor([PROMPTS[0]]), max_new_tokens=90)
    assert twins[1].generate.engines[0].stats.num_waiting == 0


def test_positions_beyond_a_learned_table_fail_as_natively():
    native, ours = make_model("gpt2"), orca_hf.wrap(make_model("gpt2"))
    made = {"inputs": torch.tensor([PROMPTS[0]]), "max_new_tokens": 125, "do_sample": False}
    expected = outcome(lambda: native.generate(**made))
    assert isinstance(expected, IndexError)
    assert isinstance(outcome(lambda: ours.generate(**made)), IndexError)


def test_memory_too_small_for_one_block_is_an_error_with_the_numbers(monkeypatch):
    monkeypatch.setattr("orca_hf.kv_pool.free_memory", lambda device: 1000)
    model = orca_hf.wrap(make_model(), OrcaConfig(memory_fraction=0.25))
    with pytest.raises(CapacityError, match=r"25% of the free memory of cpu is 250 bytes"):
        model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=2)


class Odd(LogitsProcessor, StoppingCriteria):
    """A processor or criterion that gives something odd from its `at`-th call on."""

    def __init__(self, give, before, at):
        self.give, self.before, self.at, self.calls = give, before, at, 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return self.give(input_ids, scores) if self.calls >= self.at else self.before(input_ids, scores)


def whole(value):
    return lambda input_ids, scores: torch.full_like(scores, value)


SCORES = {
    "NaN everywhere": whole(float("nan")),
    "NaN in a row": lambda input_ids, scores: torch.cat([whole(float("nan"))(None, scores[:1]), scores[1:]]),
    "-inf everywhere": whole(-float("inf")),
    "+inf everywhere": whole(float("inf")),
    "more columns": lambda input_ids, scores: torch.cat([scores, scores + 9], dim=1),
    "fewer columns": lambda input_ids, scores: scores[:, :5],
    "no column": lambda input_ids, scores: scores[:, :0],
    "more rows": lambda input_ids, scores: torch.cat([scores, scores]),
    "one row": lambda input_ids, scores: scores[:1],
    "no row": lambda input_ids, scores: scores[:0],
    "one dimension": lambda input_ids, scores: scores[0],
    "three dimensions": lambda input_ids, scores: scores[None],
    "bfloat16": lambda input_ids, scores: scores.bfloat16(),
    "float64": lambda input_ids, scores: scores.double(),
    "integers": lambda input_ids, scores: (scores * 10).long(),
    "another device": lambda input_ids, scores: scores.to("meta"),
    "nothing": lambda input_ids, scores: None,
    "a list": lambda input_ids, scores: scores.tolist(),
    "a number": lambda input_ids, scores: 3.0,
}


def of_rows(value, dtype=torch.bool):
    return lambda input_ids, scores: torch.full((len(input_ids),), value, dtype=dtype)


ENDS = {
    "True": lambda input_ids, scores: True,
    "False": lambda input_ids, scores: False,
    "a list": lambda input_ids, scores: [False] * len(input_ids),
    "nothing": lambda input_ids, scores: None,
    "a string": lambda input_ids, scores: "no",
    "numpy": lambda input_ids, scores: torch.ones(len(input_ids)).bool().numpy(),
    "no dimension": lambda input_ids, scores: torch.tensor(True),
    "one of it": lambda input_ids, scores: torch.tensor([True]),
    "one row too many": lambda input_ids, scores: torch.zeros(len(input_ids) + 1, dtype=torch.bool),
    "no row": lambda input_ids, scores: torch.zeros(0, dtype=torch.bool),
    "a column": lambda input_ids, scores: torch.zeros(len(input_ids), 1, dtype=torch.bool),
    "zeros": of_rows(0, torch.long),
    "ones": of_rows(1, torch.long),
    "floats": of_rows(0.0, torch.float32),
    "another device": lambda input_ids, scores: of_rows(True)(input_ids, scores).to("meta"),
}
OPTIONS = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "with an end": {"eos_token_id": list(range(3, 20))},
}


def same(native, ours):
    if isinstance(native, Exception):
        return type(ours) is type(native)
    return isinstance(ours, torch.Tensor) and torch.equal(ours, native)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", [*SCORES, *(f"ends: {name}" for name in ENDS)])
def test_odd_processors_and_criteria_are_answered_as_natively(twins, name, options):
    for rows, at in ((PROMPTS[3:4], 3), (PROMPTS[:2], 1), (PROMPTS[:2], 2)):
        made = {**pad_left(rows), "max_new_tokens": 3, "do_sample": False, **OPTIONS[options]}
        results = []
        for model in twins:
            if name in SCORES:
                odd = Odd(SCORES[name], lambda input_ids, scores: scores, at)
                made["logits_processor"] = LogitsProcessorList([odd])
            else:
                # Another shape in the middle of a call is refused by name: see below.
                odd = Odd(
                    ENDS[name.removeprefix("ends: ")], of_rows(False), 1 if "row" in name or "col" in name else at
                )
                made["stopping_criteria"] = StoppingCriteriaList([odd])
            results.append(outcome(lambda model=model, made=made: model.generate(**made)))
        assert same(*results), results
        assert all(engine.stats.num_reserved == 0 for engine in twins[1].generate.engines)
    good = {**pad_left(PROMPTS), "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(twins[1].generate(**good), twins[0].generate(**good)), "the next call is served"


@pytest.mark.parametrize("rows", [1, len(PROMPTS)])
def test_a_criterion_that_changes_its_shape_in_the_middle_of_a_call_is_answered_as_natively(twins, rows):
    results = []
    for model in twins:
        odd = Odd(lambda input_ids, scores: torch.zeros(7, dtype=torch.bool), of_rows(False), 3)
        made = {**pad_left(PROMPTS[:rows]), "max_new_tokens": 5, "stopping_criteria": StoppingCriteriaList([odd])}
        results.append(outcome(lambda model=model, made=made: model.generate(**made)))
    assert same(*results), results


class Remembers(StoppingCriteria):
    """Keeps what it knows by the row's place in the batch, as evaluation harnesses do."""

    def __init__(self, num_rows, stop):
        self.done = [False] * num_rows
        self.stop = stop
        self.shown = []

    def __call__(self, input_ids, scores, **kwargs):
        self.shown.append(input_ids.tolist())
        for row, done in enumerate(self.done):
            if not done:
                self.done[row] = bool(input_ids[row, -1] % self.stop == 0)
        return torch.tensor(self.done)


@pytest.mark.parametrize("max_new_tokens", [3, 16])
def test_a_criterion_is_shown_rows_that_ended_as_well(twins, max_new_tokens):
    seen = []
    for model in twins:
        criterion = Remembers(len(PROMPTS), 9)
        output = model.generate(
            **pad_left(PROMPTS),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=list(range(3, 20)),
            stopping_criteria=StoppingCriteriaList([criterion]),
        )
        seen.append((output.tolist(), criterion.shown))
    assert seen[0] == seen[1]

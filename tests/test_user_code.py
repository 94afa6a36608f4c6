"""Promise: a user's own processors, criteria and callbacks are shown what native generate() shows, call by call."""

import pytest
import torch
from oracle import SMALL, assert_same, assert_same_outcome, make_twins, num_iterations
from tiny import PROMPTS, VOCAB, make_model, pad_left
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, RepetitionPenaltyLogitsProcessor
from transformers.integrations.neftune import neftune_post_forward_hook

import orca_hf

ENDS = {"eos_token_id": list(range(3, 40)), "pad_token_id": 4}


@pytest.fixture(scope="module")
def twins():
    return make_twins()


def seen(tensor):
    """All that a user's code can see of a tensor and of the mode that it runs in."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return tensor.dtype, tuple(tensor.shape), tensor.is_contiguous(), tensor.is_inference(), tensor.requires_grad, modes


class RecordingProcessor(LogitsProcessor):
    """Remembers every call, and keeps state by row: forbids a row its own last three tokens."""

    def __init__(self):
        self.calls = []
        self.last = {}

    def __call__(self, input_ids, scores):
        self.calls.append((seen(input_ids), seen(scores), input_ids.tolist()))
        scores = scores.clone()
        for row, tokens in enumerate(input_ids[:, -1].tolist()):
            self.last.setdefault(row, []).append(tokens)
            scores[row, self.last[row][-3:]] = -5.0
        return scores


class RecordingCriterion(StoppingCriteria):
    """Remembers every call, and answers by `judge` of the tokens."""

    def __init__(self, judge):
        self.judge = judge
        self.calls = []

    def __call__(self, input_ids, scores, **kwargs):
        given = None if scores is None else (type(scores), len(scores))
        self.calls.append((seen(input_ids), input_ids.tolist(), given, kwargs))
        return self.judge(input_ids)


def write_column(input_ids):
    input_ids[:, -1] = 5
    return torch.zeros(len(input_ids), dtype=torch.bool)


JUDGES = {
    "never": lambda ids: torch.zeros(len(ids), dtype=torch.bool),
    "row by row": lambda ids: ids[:, -1] % 3 == 0,
    "all by the first row": lambda ids: (ids[0, -1] % 2 == 0).repeat(len(ids)),
    "all by those that ended": lambda ids: (ids[:, -1] == 4).any().repeat(len(ids)),
    "a column, as documented": lambda ids: ids[:, -1:] % 3 == 0,
    "a column that never ends": lambda ids: torch.zeros((len(ids), 1), dtype=torch.bool),
    "integers": lambda ids: ids[:, -1] % 3,
    "floats": lambda ids: torch.zeros(len(ids)),
    "a Python bool": lambda ids: ids.shape[1] > 14,
    "one for all": lambda ids: torch.tensor([ids.shape[1] > 14]),
    "writes into the tokens": write_column,
}
BESIDE = {
    "greedy": {},
    "eos": ENDS,
    "sampled": {"do_sample": True, "temperature": 2.0},
    "sampled, eos": {"do_sample": True, **ENDS},
    "scores": {"return_dict_in_generate": True, "output_scores": True, **ENDS},
    "max_time": {"max_time": 100.0},
}


def made(rows, **options):
    return {"max_new_tokens": 9, "do_sample": False, **pad_left(PROMPTS[:rows]), **options}


@pytest.mark.parametrize("rows", [1, len(PROMPTS)])
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("judge", JUDGES)
def test_a_criterion_is_called_and_answered_as_natively(twins, judge, beside, rows):
    def call(model):
        criterion = RecordingCriterion(JUDGES[judge])
        result = model.generate(**made(rows, **BESIDE[beside]), stopping_criteria=StoppingCriteriaList([criterion]))
        return result, criterion.calls

    assert_same_outcome(twins, call)


@pytest.mark.parametrize("rows", [1, len(PROMPTS)])
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad], ids=lambda m: m.__name__)
def test_a_processor_is_called_as_natively(twins, mode, beside, rows):
    """All rows at once, padding included, also after some have ended: it may keep state by row."""

    def call(model):
        processor = RecordingProcessor()
        with mode():
            batch = made(rows, **BESIDE[beside])
            result = model.generate(**batch, logits_processor=LogitsProcessorList([processor]))
        return result, processor.calls

    before = num_iterations(twins[1])
    assert_same_outcome(twins, call)
    assert num_iterations(twins[1]) > before


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_user_code_sees_the_prompts_dtype_as_natively(twins, dtype):
    def call(model):
        processor, criterion = RecordingProcessor(), RecordingCriterion(JUDGES["never"])
        batch = made(3)
        batch["input_ids"] = batch["input_ids"].to(dtype)
        result = model.generate(**batch, logits_processor=[processor], stopping_criteria=[criterion])
        return result, processor.calls, criterion.calls

    assert_same_outcome(twins, call)


class WritesIntoTokens(LogitsProcessor):
    """Changes what it is shown, which natively are the tokens themselves."""

    def __call__(self, input_ids, scores):
        input_ids[:, 0] = input_ids.view(-1)[-1]
        return scores


class WritesIntoLogits(LogitsProcessor):
    """Works in place, so that natively the raw logits are changed with the scores."""

    def __call__(self, input_ids, scores):
        scores[:, ::3] = -50.0
        return scores


class DrawsItself(LogitsProcessor):
    """Gumbel noise from the default generator."""

    def __call__(self, input_ids, scores):
        return scores - torch.rand_like(scores).log().neg().log()


class Subclass(RepetitionPenaltyLogitsProcessor):
    """A user's own kind of a known processor: of it nothing is known."""

    def __init__(self):
        super().__init__(1.5)
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append(tuple(input_ids.shape))
        return super().__call__(input_ids, scores) + len(self.calls)


PROCESSORS = {
    "writes into the tokens": WritesIntoTokens,
    "writes into the logits": WritesIntoLogits,
    "draws": DrawsItself,
    "subclass": Subclass,
    "function": lambda: lambda input_ids, scores: scores.flip(-1),
    "narrows the vocabulary": lambda: lambda input_ids, scores: scores[:, :50],
    "another dtype": lambda: lambda input_ids, scores: scores.double(),
    "needs more arguments": lambda: lambda input_ids, scores, more: scores,
    "of another shape": lambda: lambda input_ids, scores: scores[:, :0],
    "raises": lambda: lambda input_ids, scores: 1 / (18 - input_ids.shape[1]) * scores,
    "no callable": lambda: 3,
    "a repetition penalty of one's own": lambda: RepetitionPenaltyLogitsProcessor(1.3),
}
PROCESSED = {
    "greedy": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "eos": ENDS,
    "sampled": {"do_sample": True, "top_k": 0, "num_return_sequences": 2},
    "beside the built one": {"repetition_penalty": 1.8},
}


@pytest.mark.parametrize("rows", [1, len(PROMPTS)])
@pytest.mark.parametrize("beside", PROCESSED)
@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_of_any_kind_gives_what_it_gives_natively(twins, name, beside, rows):
    def call(model):
        return model.generate(**made(rows, **PROCESSED[beside]), logits_processor=[PROCESSORS[name]()])

    assert_same_outcome(twins, call)


class LaterLength(MaxLengthCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.max_length + 3)


CRITERIA = {
    "a later length": lambda: [LaterLength(15)],
    "eos of one's own": lambda: [EosTokenCriteria(list(range(3, 50)))],
    "lengths": lambda: [MaxLengthCriteria(18), MaxLengthCriteria(13)],
    "a length below the prompt": lambda: [MaxLengthCriteria(5)],
    "a length above max_new_tokens": lambda: [MaxLengthCriteria(26)],
    "function": lambda: [lambda input_ids, scores: input_ids.shape[1] > 15],
    "not in a list": lambda: LaterLength(15),
    "raises": lambda: [lambda input_ids, scores: 1 / (15 - input_ids.shape[1]) > 3],
}


@pytest.mark.parametrize("beside", [*BESIDE, "no pad"])
@pytest.mark.parametrize("name", CRITERIA)
def test_a_criterion_of_any_kind_gives_what_it_gives_natively(twins, name, beside):
    options = BESIDE.get(beside, {"pad_token_id": None})
    assert_same_outcome(twins, lambda model: model.generate(**made(5, **options), stopping_criteria=CRITERIA[name]()))


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "num_return_sequences": 3}, ENDS], ids=str)
def test_the_prefix_function_sees_the_rows_as_natively(twins, options):
    """batch_id counts prompts, not rows, and the tokens come with their padding."""

    def call(model):
        calls = []

        def allowed(batch_id, tokens):
            calls.append((batch_id, tokens.tolist(), tokens.dtype))
            return [batch_id + 3, len(tokens) % VOCAB, 50, 4]

        return model.generate(**made(5, **options), prefix_allowed_tokens_fn=allowed), calls

    assert_same_outcome(twins, call)


@pytest.mark.parametrize("answer", [[], [VOCAB + 3], None], ids=str)
def test_a_prefix_function_that_answers_wrongly_fails_as_natively(twins, answer):
    assert_same_outcome(twins, lambda m: m.generate(**made(2), prefix_allowed_tokens_fn=lambda batch, ids: answer))


def test_rows_that_do_not_fit_at_once_are_shown_together_all_the_same(caplog):
    config = orca_hf.OrcaConfig(max_batch_size=2, max_slots=64, max_batch_tokens=8, block_size=8)
    calls = []
    for model in (make_model(), orca_hf.wrap(make_model(), config)):
        processor = RecordingProcessor()
        model.generate(**made(5, max_new_tokens=20), logits_processor=[processor])
        calls.append(processor.calls)
    assert_same(*calls)
    assert "do not fit" in caplog.text
    assert SMALL.max_slots > config.max_slots


class Acting:
    """A streamer that does something at each token."""

    def __init__(self, act):
        self.act = act

    def put(self, value):
        self.act(value)

    def end(self):
        pass


def draws(model):
    return lambda value: torch.rand(3)


def reseeds(model):
    return lambda value: torch.manual_seed(int(value.reshape(-1)[-1]))


def generates(model):
    return lambda value: model.generate(value.reshape(1, -1), max_new_tokens=2, do_sample=True)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.8, "temperature": 1.4}, {"repetition_penalty": 1.2}, ENDS])
@pytest.mark.parametrize("act", [draws, reseeds, generates], ids=lambda act: act.__name__)
def test_a_streamer_may_draw_between_a_rows_draws(twins, act, options):
    def call(model):
        return model.generate(**made(1, do_sample=True, **options), streamer=Acting(act(model)))

    assert_same_outcome(twins, call)


@pytest.mark.parametrize("first_ends", [True, False])
@pytest.mark.parametrize("rows", [1, 2, len(PROMPTS)])
def test_a_column_beside_an_eos_token_is_as_natively(twins, rows, first_ends):
    """A processor sees each step once, whatever becomes of the call."""

    def call(model):
        processor = RecordingProcessor()
        criterion = RecordingCriterion(JUDGES["a column, as documented"])
        ends = {"eos_token_id": list(range(97)) if first_ends else 5, "pad_token_id": 4}
        options = made(rows, **ends, stopping_criteria=StoppingCriteriaList([criterion]))
        try:
            result = model.generate(**options, logits_processor=LogitsProcessorList([processor]))
        except RuntimeError as error:
            result = str(error)
        return result, processor.calls, criterion.calls

    assert_same_outcome(twins, call)


def test_noise_in_training_leaves_random_numbers_as_natively():
    """NEFTune's: its model goes native, and the trial that found it out drew from nobody's numbers."""
    results = []
    for model in make_twins():
        embedding = model.get_input_embeddings()
        embedding.neftune_noise_alpha = 5.0
        embedding.register_forward_hook(neftune_post_forward_hook)
        model.train()
        torch.manual_seed(4)
        results.append((model.generate(**made(2)), torch.rand(1)))
    assert_same(*results)


def rewrite_first(input_ids, scores):
    input_ids[:, 0] = input_ids[:, -1]
    return scores


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("place", ["processor", "criterion"])
def test_code_that_changes_earlier_tokens_acts_as_natively_with_and_without_a_cache(twins, place, use_cache):
    def call(model):
        if place == "processor":
            options = {"logits_processor": LogitsProcessorList([rewrite_first])}
        else:
            judge = RecordingCriterion(lambda ids: rewrite_first(ids, torch.zeros(len(ids), dtype=torch.bool)))
            options = {"stopping_criteria": StoppingCriteriaList([judge])}
        return model.generate(**made(3, use_cache=use_cache, **options))

    assert_same_outcome(twins, call)

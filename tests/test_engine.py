"""Promises of the engine: threads share one batch, one call's failure is its own, and nothing is lost."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from joined import Gate, joined_calls
from tiny import PROMPTS, make_model, pad_left
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import orca_hf
from orca_hf import OrcaConfig
from orca_hf.runner import ModelRunner

CONFIG = OrcaConfig(max_batch_size=4, max_batch_tokens=16, max_slots=512, block_size=4, trust_modules=(__name__,))


def assert_idle(model):
    """All slots are back and nobody is counted as waiting."""
    for engine in model.generate.engines:
        stats = engine.stats
        assert (stats.num_waiting, stats.num_admitted, stats.num_reserved) == (0, 0, 0)
        assert engine.idle
        assert not engine.scheduler._admitted
        assert engine.scheduler.kv_manager._allocator.num_free == engine.scheduler.kv_manager.num_blocks
    assert model.config._attn_implementation == "sdpa"
    assert not any("forward" in module.__dict__ for module in model.modules())


CALLS = [
    {"max_new_tokens": 12},
    {"max_new_tokens": 3},
    {"max_new_tokens": 20, "repetition_penalty": 1.5},
    {"max_new_tokens": 9, "eos_token_id": list(range(3, 50))},
    {"max_new_tokens": 7, "num_return_sequences": 1, "return_dict_in_generate": True, "output_scores": True},
    {"max_new_tokens": 12, "no_repeat_ngram_size": 2},
    {"max_new_tokens": 6, "num_beams": 2},
    {"max_new_tokens": 1},
]


def sequences(result):
    return result if isinstance(result, torch.Tensor) else result.sequences


def test_eight_threads_equal_eight_sequential_calls():
    model = make_model()
    rows = [PROMPTS[i % len(PROMPTS) :] + PROMPTS[:1] for i in range(len(CALLS))]
    alone = [
        sequences(model.generate(**pad_left(prompts), do_sample=False, **options))
        for prompts, options in zip(rows, CALLS, strict=True)
    ]
    orca_hf.wrap(model, CONFIG)
    barrier = threading.Barrier(len(CALLS))

    def call(index):
        barrier.wait()
        return sequences(model.generate(**pad_left(rows[index]), do_sample=False, **CALLS[index]))

    with ThreadPoolExecutor(len(CALLS)) as threads:
        for _ in range(3):
            together = list(threads.map(call, range(len(CALLS))))
            assert all(torch.equal(ours, native) for ours, native in zip(together, alone, strict=True))
    assert_idle(model)


def raising(error):
    def action():
        raise error

    return action


class RaisingCriterion(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        raise LookupError("criterion")


class RaisingStreamer:
    def __init__(self):
        self.heard = 0

    def put(self, value):
        self.heard += 1
        if self.heard == 4:
            raise OSError("closed pipe")

    def end(self):
        pass


FAILING = {
    "processor": ({"logits_processor": lambda: LogitsProcessorList([Gate(2, raising(ZeroDivisionError("mine")))])},
                  ZeroDivisionError),
    "criterion": ({"stopping_criteria": lambda: StoppingCriteriaList([RaisingCriterion()])}, LookupError),
    "streamer": ({"streamer": RaisingStreamer}, OSError),
    "processor with a wrong shape": (
        {"logits_processor": lambda: LogitsProcessorList([lambda input_ids, scores: scores[:, :0]])}, IndexError),
    "token id out of the vocabulary": ({"input_ids": lambda: torch.tensor([[5, 4000]])}, IndexError),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILING)
def test_a_failing_call_fails_alone(name):
    model = make_model()
    good = {"input_ids": torch.tensor([PROMPTS[3]]), "max_new_tokens": 10, "do_sample": False}
    expected = model.generate(**good)
    expected_first = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=24, do_sample=False)
    orca_hf.wrap(model, CONFIG)
    model.generate(**good)
    options, error = FAILING[name]
    bad = {**good, **{key: make() for key, make in options.items()}}
    first, *others = joined_calls(model, [good, good]) if "vocabulary" in name else joined_calls(model, [good, bad])
    assert torch.equal(first, expected_first)
    assert torch.equal(others[0], expected)
    if "vocabulary" in name:
        with pytest.raises(error):
            model.generate(**bad)
    else:
        assert isinstance(others[1], error)
    assert_idle(model)
    assert torch.equal(model.generate(**good), expected)


def test_an_interrupted_driver_loses_its_own_call_and_no_other():
    """Ctrl-C comes in the middle of an iteration that others share; they finish under the next driver."""
    model = make_model()
    good = {"input_ids": torch.tensor([PROMPTS[3]]), "max_new_tokens": 10, "do_sample": False}
    expected = model.generate(**good)
    orca_hf.wrap(model, CONFIG)
    model.generate(**good)
    for after in (1, 2, 5):
        interrupted = {**good, "logits_processor": LogitsProcessorList([Gate(after, raising(KeyboardInterrupt()))])}
        _, *others = joined_calls(model, [good, interrupted, good])
        outcomes = [outcome for outcome in others if not isinstance(outcome, torch.Tensor)]
        assert all(torch.equal(outcome, expected) for outcome in others if isinstance(outcome, torch.Tensor))
        # Whoever drove when the interrupt came sees it; the call whose processor raised it has ended either way.
        assert len(outcomes) >= 1
        assert_idle(model)
    assert torch.equal(model.generate(**good), expected)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
@pytest.mark.parametrize("at", [0, 3])
def test_an_interruption_or_error_in_the_forward_leaves_everything_usable(monkeypatch, error, at):
    model = orca_hf.wrap(make_model(), CONFIG)
    batch = {**pad_left(PROMPTS), "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**batch)
    seen = []

    attention = type(model.model.layers[0].self_attn)
    plain = attention.forward

    def interrupt(self, *args, **kwargs):
        seen.append(self)
        if len(seen) == at * len(model.model.layers) + 2:
            raise error("in the middle")
        return plain(self, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(attention, "forward", interrupt)
        model.generate(**batch)
    assert_idle(model)
    assert torch.equal(model.generate(**batch), expected)


def test_a_call_from_inside_a_callback_runs_natively():
    model = make_model()
    prompt = torch.tensor([PROMPTS[1]])
    expected = model.generate(prompt, max_new_tokens=4, do_sample=False)
    orca_hf.wrap(model, CONFIG)
    inner = []

    def nested():
        inner.append(model.generate(prompt, max_new_tokens=4, do_sample=False))

    outer = model.generate(
        prompt, max_new_tokens=4, do_sample=False, logits_processor=LogitsProcessorList([Gate(1, nested)])
    )
    assert torch.equal(outer, expected)
    assert len(inner) == 3
    assert all(torch.equal(result, expected) for result in inner)
    assert_idle(model)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_another_threads_use_of_the_model_during_an_iteration_is_native(monkeypatch, implementation):
    """The switch to Orca's attention belongs to the thread that runs the iteration; copies do not take it along."""
    model = make_model()
    model.set_attn_implementation(implementation)
    batch = pad_left(PROMPTS)
    mask = batch["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**batch).logits
    orca_hf.wrap(model, CONFIG)
    model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=20, do_sample=False)
    found, copies = [], []

    def forward():
        with torch.no_grad():
            found.append(model(**batch).logits)
        copies.append(copy.deepcopy(model))
        copies.append(pickle.loads(pickle.dumps(model)))

    layer = type(model.model.layers[0])
    plain = layer.forward

    def meanwhile(self, *args, **kwargs):
        if threading.current_thread() is threading.main_thread() and self is model.model.layers[1] and len(found) < 2:
            thread = threading.Thread(target=forward)
            thread.start()
            thread.join()
        return plain(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", meanwhile)
        model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=20, do_sample=False)
    assert len(found) == 2
    for twin in copies:
        assert twin.config._attn_implementation == implementation
        with torch.no_grad():
            twin.lm_head.weight.neg_()
            found.append(-twin(**batch).logits)
    for logits in found:
        torch.testing.assert_close(logits[mask], expected[mask], atol=1e-4, rtol=1e-4)


def test_two_models_that_share_a_config_and_run_at_once_leave_it_whole():
    first, second = make_model(), make_model(seed=1)
    second.config = second.model.config = first.config
    for module in second.modules():
        if hasattr(module, "config"):
            module.config = first.config
    prompt = torch.tensor([PROMPTS[0]])
    expected = [model.generate(prompt, max_new_tokens=40, do_sample=False) for model in (first, second)]
    for model in (first, second):
        orca_hf.wrap(model, CONFIG)

    def generate(model):
        return [model.generate(prompt, max_new_tokens=40, do_sample=False) for _ in range(4)]

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(generate, (first, second)))
    for outputs, native in zip(results, expected, strict=True):
        assert all(torch.equal(output, native) for output in outputs)
    assert first.config._attn_implementation == "sdpa"


def test_rows_leave_the_batch_as_they_finish():
    """The token count says so: request-level batching would compute every row to the longest one's end."""
    model = orca_hf.wrap(make_model(), replace(CONFIG, num_speculative_tokens=0))
    engine = None
    calls = [{"input_ids": torch.tensor([[7, 8, 9]]), "max_new_tokens": n, "do_sample": False} for n in (1, 2, 30)]
    model.generate(**calls[0])
    engine = model.generate.engines[0]
    before = engine.stats.num_tokens
    joined_calls(model, calls)
    first = len(PROMPTS[0]) + 23
    assert engine.stats.num_tokens - before == first + sum(2 + call["max_new_tokens"] for call in calls)


def test_memory_is_given_back_on_request_and_made_again():
    model = orca_hf.wrap(make_model(), CONFIG)
    batch = {**pad_left(PROMPTS), "max_new_tokens": 20, "do_sample": False}
    expected = model.generate(**batch)
    stats = model.generate.engines[0].stats
    assert stats.kv_bytes > 0
    assert stats.packed_bytes > 0
    orca_hf.release(model)
    stats = model.generate.engines[0].stats
    assert (stats.kv_bytes, stats.packed_bytes) == (0, 0)
    assert torch.equal(model.generate(**batch), expected)


def test_memory_is_given_back_when_idle_if_the_settings_say_so():
    model = orca_hf.wrap(make_model(), OrcaConfig(max_slots=256, free_when_idle=True))
    expected = make_model().generate(**pad_left(PROMPTS), max_new_tokens=20, do_sample=False)
    for _ in range(2):
        assert torch.equal(model.generate(**pad_left(PROMPTS), max_new_tokens=20, do_sample=False), expected)
        stats = model.generate.engines[0].stats
        assert (stats.kv_bytes, stats.packed_bytes) == (0, 0)


def test_logits_are_computed_only_for_rows_that_sample(monkeypatch):
    model = orca_hf.wrap(make_model(), replace(CONFIG, max_batch_tokens=6, pack_weights=False))
    model.generate(**pad_left(PROMPTS), max_new_tokens=1)
    shapes, kept = [], []
    run, linear = ModelRunner.run, torch.nn.Linear.forward

    def recording_run(self, iteration, remaining=0):
        kept.append(max(1, sum(step.samples for step in iteration.steps)))
        return run(self, iteration, remaining)

    def recording_linear(self, hidden):
        if self is model.lm_head:
            shapes.append(hidden.shape[1])
        return linear(self, hidden)

    monkeypatch.setattr(ModelRunner, "run", recording_run)
    monkeypatch.setattr(torch.nn.Linear, "forward", recording_linear)
    model.generate(**pad_left(PROMPTS), max_new_tokens=4, do_sample=False)
    assert shapes == kept
    assert max(shapes) <= 4


def test_wrapping_anew_while_a_call_runs_leaves_the_model_whole():
    """Two engines on one model take turns; neither undoes the other's changes in the middle."""
    model = make_model()
    prompt = torch.tensor([PROMPTS[0]])
    expected = model.generate(prompt, max_new_tokens=30, do_sample=False)
    orca_hf.wrap(model, CONFIG)
    stop = threading.Event()
    results = []

    def keep_generating():
        while not stop.is_set():
            results.append(model.generate(prompt, max_new_tokens=30, do_sample=False))

    threads = [threading.Thread(target=keep_generating) for _ in range(3)]
    for thread in threads:
        thread.start()
    for size in range(1, 12):
        orca_hf.wrap(model, OrcaConfig(max_batch_size=size, max_slots=512))
        if size % 3 == 0:
            orca_hf.unwrap(model)
        results.append(model.generate(prompt, max_new_tokens=30, do_sample=False))
    stop.set()
    for thread in threads:
        thread.join()
    assert len(results) > 11
    assert all(torch.equal(result, expected) for result in results)
    orca_hf.wrap(model)
    assert_idle(model)

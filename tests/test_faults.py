"""Promise: whatever fails in or around a call, nobody hangs, other calls go on, and all memory comes back."""

import os
import signal
import threading
import time

import pytest
import torch
from acting import Criterion, Processor, Streamer
from tiny import PROMPTS, make_model, pad_left
from torch.utils.data import DataLoader
from transformers import LogitsProcessorList, StoppingCriteriaList

import orca_hf
from orca_hf import CapacityError, OrcaConfig

CONFIG = OrcaConfig(max_batch_size=4, max_batch_tokens=16, max_slots=512, block_size=4, trust_modules=(__name__,))
BATCH = {**pad_left(PROMPTS), "max_new_tokens": 8, "do_sample": False}
ONE = {"input_ids": torch.tensor([PROMPTS[3]]), "max_new_tokens": 12, "do_sample": False}
WAIT = 30


def assert_whole(model, implementation="sdpa"):
    for engine in model.generate.engines:
        stats = engine.stats
        assert (stats.num_waiting, stats.num_admitted, stats.num_reserved) == (0, 0, 0)
    assert model.config._attn_implementation == implementation
    assert not any("forward" in module.__dict__ for module in model.modules())


def in_threads(*calls):
    """Each call's result or error; none of them may hang."""
    results = [None] * len(calls)

    def run(index):
        try:
            results[index] = calls[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert not any(thread.is_alive() for thread in threads), "a call hangs"
    return results


def fail(error):
    raise error


def with_callback(act):
    """Ways to have `act` called in the middle of a call."""
    return {
        "a streamer's put": {"streamer": Streamer(in_put=act)},
        "a streamer's first put": {"streamer": Streamer(in_put=act, at=1)},
        "a streamer's end": {"streamer": Streamer(in_end=act)},
        "a processor": {"logits_processor": LogitsProcessorList([Processor(act)])},
        "a criterion": {"stopping_criteria": StoppingCriteriaList([Criterion(act)])},
    }


PLACES = list(with_callback(None))


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, StopIteration])
@pytest.mark.parametrize("place", PLACES)
def test_an_error_of_the_users_ends_its_call_and_no_other(place, error):
    model = make_model()
    expected, of_batch = model.generate(**ONE), model.generate(**BATCH)
    orca_hf.wrap(model, CONFIG)
    model.generate(**ONE)
    bad = {**ONE, **with_callback(lambda: fail(error("the user's")))[place]}
    results = in_threads(lambda: model.generate(**ONE), lambda: model.generate(**bad), lambda: model.generate(**BATCH))
    raised = [result for result in results if isinstance(result, BaseException)]
    if issubclass(error, Exception):
        assert isinstance(results[1], error)
        assert len(raised) == 1
    else:
        # Ctrl-C belongs to whichever thread it comes to: the one that drives, which then leaves with it.
        assert error in map(type, raised)
        assert 1 <= len(raised) <= 2
    assert results[0] in raised or torch.equal(results[0], expected)
    assert results[2] in raised or torch.equal(results[2], of_batch)
    assert_whole(model)
    assert torch.equal(model.generate(**BATCH), of_batch)
    assert (
        type(in_threads(lambda: model.generate(**{**ONE, **with_callback(lambda: fail(error()))[place]}))[0]) is error
    )
    assert_whole(model)


@pytest.mark.parametrize("place", PLACES)
def test_a_call_from_inside_a_call_is_answered(place):
    model = make_model()
    expected, of_batch = model.generate(**ONE), model.generate(**BATCH)
    orca_hf.wrap(model, CONFIG)
    inner = []
    options = with_callback(lambda: inner.append(model.generate(**BATCH)))[place]
    results = in_threads(lambda: model.generate(**ONE, **options), lambda: model.generate(**ONE))
    assert all(torch.equal(result, expected) for result in results)
    assert len(inner) == 1
    assert torch.equal(inner[0], of_batch)
    assert_whole(model)


@pytest.mark.parametrize("place", PLACES)
def test_wrap_release_and_unwrap_from_inside_a_call(place):
    model = make_model()
    expected = model.generate(**ONE)
    for act in (orca_hf.release, orca_hf.unwrap, lambda model: orca_hf.wrap(model, OrcaConfig(max_slots=64))):
        orca_hf.wrap(model, CONFIG)
        options = with_callback(lambda act=act: act(model))[place]
        assert torch.equal(in_threads(lambda options=options: model.generate(**ONE, **options))[0], expected)
        orca_hf.wrap(model, CONFIG)
        assert torch.equal(model.generate(**ONE), expected)
        assert_whole(model)


def test_threads_that_wait_go_on_when_the_driver_is_interrupted():
    model = make_model()
    expected = model.generate(**ONE)
    orca_hf.wrap(model, CONFIG)
    waiting = threading.Barrier(4)

    def interrupt():
        deadline = time.monotonic() + WAIT
        while model.generate.engines[0].stats.num_waiting + model.generate.engines[0].stats.num_admitted < 4:
            assert time.monotonic() < deadline
        raise KeyboardInterrupt

    def call(**options):
        waiting.wait(WAIT)
        return model.generate(**ONE, **options)

    model.generate(**ONE)
    callback = {"logits_processor": LogitsProcessorList([Processor(interrupt, at=1)])}
    results = in_threads(lambda: call(**callback), call, call, call)
    assert sum(isinstance(result, KeyboardInterrupt) for result in results) == 1
    assert sum(isinstance(result, torch.Tensor) and torch.equal(result, expected) for result in results) >= 2
    assert_whole(model)
    assert torch.equal(model.generate(**ONE), expected)


CHANGES = {
    "to float64": lambda model: model.to(torch.float64),
    "to bfloat16": lambda model: model.to(torch.bfloat16),
    "to another device": lambda model: model.to("meta"),
    "a layer less": lambda model: model.model.layers.__delitem__(1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_changed_in_the_middle_of_a_call(name):
    """Natively such a call goes on or raises; here as well, and the next call is the changed model's."""
    plain, model = make_model(), orca_hf.wrap(make_model(), CONFIG)
    model.generate(**ONE)
    change = {"logits_processor": LogitsProcessorList([Processor(lambda: CHANGES[name](model))])}
    results = in_threads(lambda: model.generate(**ONE, **change), lambda: model.generate(**ONE))
    assert all(isinstance(result, torch.Tensor | Exception) for result in results)
    CHANGES[name](plain)
    if name == "to another device":
        for each in (plain, model):
            each.to_empty(device="cpu").load_state_dict(make_model(seed=4).state_dict())
            each.model.rotary_emb = make_model().model.rotary_emb
    for engine in model.generate.engines:
        assert engine.stats.num_reserved == 0
    if name == "to bfloat16":
        assert model.generate(**ONE).shape == plain.generate(**ONE).shape
    else:
        assert torch.equal(model.generate(**ONE), plain.generate(**ONE))
    assert_whole(model)


@pytest.mark.parametrize("at", [1, 2, 5, 6])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_signals_handler_may_generate_in_the_middle_of_a_forward(monkeypatch, implementation, at):
    """The first two forwards of an attention are the trial's."""
    plain, model = make_model(), make_model()
    for each in (plain, model):
        each.set_attn_implementation(implementation)
    expected, of_batch = plain.generate(**ONE), plain.generate(**BATCH)
    orca_hf.wrap(model, CONFIG)
    answers, seen = [], []
    attention = type(model.model.layers[0].self_attn)
    own = attention.forward

    def forward(self, *args, **kwargs):
        seen.append(self)
        if len(seen) == 2 * at:
            signal.raise_signal(signal.SIGUSR1)
        return own(self, *args, **kwargs)

    before = signal.signal(signal.SIGUSR1, lambda number, frame: answers.append(model.generate(**BATCH)))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(attention, "forward", forward)
            assert torch.equal(model.generate(**ONE), expected)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(answers) == 1
    assert torch.equal(answers[0], of_batch)
    assert_whole(model, implementation)
    assert torch.equal(model.generate(**ONE), expected)


def test_a_call_whose_tokens_the_model_has_no_embedding_for_fails_alone():
    """The head is wider than the embedding, so that natively such a call's next forward raises."""
    model = make_model()
    with torch.no_grad():
        wider = torch.nn.Linear(48, 120, bias=False)
        wider.weight[:97] = model.lm_head.weight
        wider.weight[97:] = 0
        wider.weight[110] = model.lm_head.weight[model.generate(**ONE)[0, -5]] * 1.01
    model.lm_head = wider
    bad = {**ONE, "min_new_tokens": 12}
    with pytest.raises(IndexError) as native:
        model.generate(**bad)
    good = {"input_ids": torch.tensor([PROMPTS[0]]), "max_new_tokens": 12, "do_sample": False, "suppress_tokens": [110]}
    expected = model.generate(**good)
    orca_hf.wrap(model, CONFIG)
    results = in_threads(*[lambda call=call: model.generate(**call) for call in (good, bad, good, bad)])
    for result in results[::2]:
        assert torch.equal(result, expected)
    for result in results[1::2]:
        assert type(result) is type(native.value)
        assert str(result) == str(native.value)
    assert_whole(model)


def test_memory_that_cannot_be_had_again_after_a_release(monkeypatch):
    """The call runs natively and says why, and by Orca again as soon as there is memory."""
    model = make_model()
    expected = model.generate(**BATCH)
    orca_hf.wrap(model, CONFIG)
    model.generate(**BATCH)
    orca_hf.release(model)
    assert model.generate.engines[0].runner.pool.num_bytes == 0
    iterations = model.generate.engines[0].stats.num_iterations
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", lambda *args: fail(RuntimeError("DefaultCPUAllocator: not enough")))
        assert torch.equal(model.generate(**BATCH), expected)
        assert model.generate.engines[0].stats.num_iterations == iterations
        assert_whole(model)
    assert torch.equal(model.generate(**BATCH), expected)
    assert model.generate.engines[0].stats.num_iterations > iterations
    assert_whole(model)


def test_memory_that_shrinks_is_refused_with_the_numbers_and_used_when_it_is_back(monkeypatch):
    model = orca_hf.wrap(make_model(), OrcaConfig(memory_fraction=0.5))
    expected = model.generate(**BATCH)
    with monkeypatch.context() as patch:
        patch.setattr("orca_hf.kv_pool.free_memory", lambda device: 64 * 2 * 4 * 24 * 2 * 2)
        orca_hf.wrap(model, OrcaConfig(memory_fraction=0.25))  # settings of its own: an engine of its own
        with pytest.raises(CapacityError, match=r"needs \d+ slots, the pool has \d+"):
            model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=90)
        assert torch.equal(model.generate(**BATCH), expected), "what fits is served"
        assert_whole(model)
        patch.setattr("orca_hf.kv_pool.free_memory", lambda device: 1000)
        orca_hf.wrap(model, OrcaConfig(memory_fraction=0.3))
        for _ in range(2):
            with pytest.raises(CapacityError, match=r"30% of the free memory of cpu is 300 bytes"):
                model.generate(**BATCH)
        assert model.generate.engines == ()
    assert torch.equal(model.generate(**BATCH), expected)
    assert orca_hf.explain(model).runs_by == "orca"


@pytest.mark.parametrize("gives_back", [orca_hf.release, lambda model: None], ids=["release", "free_when_idle"])
def test_memory_that_has_become_scarce_while_idle_is_looked_at_again(gives_back, monkeypatch):
    config = OrcaConfig(memory_fraction=0.5, free_when_idle=gives_back is not orca_hf.release)
    model = orca_hf.wrap(make_model(), config)
    expected = model.generate(**BATCH)
    plenty = model.generate.engines[0].stats.num_slots
    gives_back(model)
    with monkeypatch.context() as patch:
        bytes_per_slot = 2 * 2 * 2 * 12 * 4  # layers, K and V, heads, head_dim, float32
        patch.setattr("orca_hf.kv_pool.free_memory", lambda device: 2 * 64 * bytes_per_slot)
        with pytest.raises(CapacityError, match="needs 100 slots, the pool has 64"):
            model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=90)
        assert torch.equal(model.generate(**BATCH), expected), "what fits is served"
        assert model.generate.engines[0].stats.num_slots == 64
        patch.setattr("orca_hf.kv_pool.free_memory", lambda device: 1000)
        orca_hf.release(model)
        with pytest.raises(CapacityError, match="50% of the free memory of cpu is 500 bytes"):
            model.generate(**BATCH)
        assert_whole(model)
    orca_hf.release(model)
    assert torch.equal(model.generate(**BATCH), expected)
    assert model.generate.engines[0].stats.num_slots == plenty


def test_weights_are_not_packed_where_memory_is_short(monkeypatch):
    model = make_model()
    expected = model.generate(**BATCH)
    orca_hf.wrap(model, CONFIG)
    with monkeypatch.context() as patch:
        patch.setattr("orca_hf.runner.free_memory", lambda device: 1000)
        for _ in range(3):
            assert torch.equal(model.generate(**BATCH), expected)
        assert model.generate.engines[0].stats.packed_bytes == 0
    assert torch.equal(model.generate(**BATCH), expected)
    assert model.generate.engines[0].stats.packed_bytes > 0


def child_succeeds(work):
    """Whether `work()` returns True in a forked child; a child that hangs is ended."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if work() else 1)
        except BaseException:
            os._exit(2)
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


@forks
def test_a_child_generates_as_its_parent_does():
    model = make_model()
    expected = model.generate(**BATCH)
    orca_hf.wrap(model, CONFIG)
    for _ in range(3):
        assert torch.equal(model.generate(**BATCH), expected)
    assert child_succeeds(lambda: torch.equal(model.generate(**BATCH), expected))
    assert child_succeeds(lambda: orca_hf.explain(model).runs_by == "orca")
    assert torch.equal(model.generate(**BATCH), expected)


@forks
@pytest.mark.parametrize("where", ["in a processor", "in a forward"])
def test_a_child_does_not_wait_for_threads_that_it_does_not_have(monkeypatch, where):
    """The fork comes while another thread drives, holds the model's lock and has its linears packed."""
    model = make_model()
    expected = model.generate(**BATCH)
    torch.manual_seed(0)
    sampled = model.generate(**{**BATCH, "do_sample": True})
    orca_hf.wrap(model, CONFIG)
    for _ in range(3):
        model.generate(**BATCH)
    there, go_on = threading.Event(), threading.Event()

    def park():
        there.set()
        assert go_on.wait(WAIT)

    options = {"logits_processor": LogitsProcessorList([Processor(park)])} if where == "in a processor" else {}
    attention = type(model.model.layers[0].self_attn)
    plain = attention.forward
    parked = threading.Thread(target=lambda: model.generate(**ONE, **options), daemon=True)
    with monkeypatch.context() as patch:
        if where == "in a forward":

            def forward(self, *args, **kwargs):
                if threading.current_thread() is parked and not there.is_set():
                    park()
                return plain(self, *args, **kwargs)

            patch.setattr(attention, "forward", forward)
        parked.start()
        assert there.wait(WAIT)

        def in_child():
            assert_whole(model)
            assert torch.equal(model.generate(**BATCH), expected)
            torch.manual_seed(0)
            assert torch.equal(model.generate(**{**BATCH, "do_sample": True}), sampled)
            with torch.no_grad():
                model.lm_head.weight.neg_()
            assert not torch.equal(model.generate(**BATCH), expected)
            return orca_hf.is_wrapped(orca_hf.release(model)) and not orca_hf.is_wrapped(orca_hf.unwrap(model))

        assert child_succeeds(in_child)
        go_on.set()
        parked.join(WAIT)
    assert not parked.is_alive()
    assert torch.equal(model.generate(**BATCH), expected)
    assert_whole(model)


class Prompts(torch.utils.data.Dataset):
    """Answers each item by the model itself, in a worker."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return len(PROMPTS)

    def __getitem__(self, index):
        return self.model.generate(torch.tensor([PROMPTS[index]]), max_new_tokens=5, do_sample=False)[0, -5:]


@forks
def test_workers_of_a_data_loader_may_hold_a_wrapped_model():
    model = make_model()
    expected = torch.stack([Prompts(model)[index] for index in range(len(PROMPTS))])
    orca_hf.wrap(model, CONFIG).generate(**BATCH)
    loader = DataLoader(
        Prompts(model), batch_size=len(PROMPTS), num_workers=1, multiprocessing_context="fork", timeout=WAIT
    )
    assert torch.equal(next(iter(loader)), expected)
    assert_whole(model)

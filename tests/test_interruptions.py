"""Promise: Ctrl-C may come at any moment. Its call ends with it; nobody else notices, and nothing is left behind."""

import threading

import pytest
import torch
from interrupting import Interrupter
from tiny import PROMPTS, make_model, pad_left

import orca_hf
from orca_hf import OrcaConfig

WAIT = 60
CONFIG = OrcaConfig(max_batch_size=4, max_batch_tokens=16, max_slots=512, block_size=4)
BATCH = {**pad_left(PROMPTS[1:4]), "max_new_tokens": 3, "do_sample": False}
CALLS = {
    "greedy": BATCH,
    "sampled in step": {**BATCH, "do_sample": True},
    "with a processor": {**BATCH, "repetition_penalty": 1.2},
    "one sampled row": {**BATCH, **pad_left(PROMPTS[:1]), "do_sample": True},
    "the cache": {**BATCH, "return_dict_in_generate": True, "output_scores": True},
}


def in_a_thread(work):
    """The result of `work()` on a thread of its own, which no lock of this one's may keep waiting."""
    results = []

    def run():
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT)
    assert results, "a call of another thread hangs"
    return results[0]


def seeded(model, call):
    torch.manual_seed(3)
    output = model.generate(**call)
    return (output if isinstance(output, torch.Tensor) else output.sequences).tolist(), torch.get_rng_state().tolist()


def assert_whole(model):
    assert type(model.config._attn_implementation) is str
    assert not any("forward" in module.__dict__ for module in model.modules())
    for engine in model.generate.engines:
        stats = in_a_thread(lambda engine=engine: engine.stats)
        assert not isinstance(stats, BaseException), stats
        assert (stats.num_waiting, stats.num_admitted, stats.num_reserved) == (0, 0, 0)
        assert not engine.is_driven
        assert engine.scheduler.faults() == []


def distinct(places):
    """Each place once, with how often it is come to."""
    counts = {}
    for place in places:
        counts[place] = counts.get(place, 0) + 1
    return counts


def interrupt_everywhere(model, call, *, skipped=frozenset(), by_instruction=False, part=slice(None)):
    """Interrupt `call` at the first and the last time that it comes to each place, and look at what is left.

    Returns:
        The places that it comes to, and the number of interruptions.
    """
    expected = seeded(model, call)
    seeded(model, call)  # from here on it goes the same way
    interrupter = Interrupter(by_instruction=by_instruction)
    counts = distinct(interrupter.places(lambda: seeded(model, call)))
    chosen = [(place, nth) for place, count in counts.items() if place not in skipped for nth in {1, count}][part]
    torch.set_grad_enabled(True)
    for place, nth in chosen:
        raised = interrupter.interrupt(lambda: seeded(model, call), place, nth)
        where = f"{place[0].co_filename}:{place[0].co_qualname}:{place[1]}, time {nth}"
        assert raised is None or isinstance(raised, KeyboardInterrupt), (where, raised)
        assert torch.is_grad_enabled(), where
        try:
            assert_whole(model)
            assert in_a_thread(lambda: seeded(model, call)) == expected
        except BaseException as error:
            raise AssertionError(f"after an interruption at {where}") from error
    return set(counts), len(chosen)


@pytest.mark.parametrize("first", [0, 1])
def test_at_every_line_of_a_call(first):
    """Of further kinds of calls, at those lines that no other has come to."""
    model = orca_hf.wrap(make_model(), CONFIG)
    seen, total = set(), 0
    for call in CALLS.values():
        places, num_interruptions = interrupt_everywhere(model, call, skipped=seen, part=slice(first, None, 2))
        seen |= places
        total += num_interruptions
    assert total > 900


def test_at_instructions_of_a_call():
    """Every forty-third of them; `interrupt_everywhere` with another part tries the rest."""
    model = orca_hf.wrap(make_model(), CONFIG)
    _, num_interruptions = interrupt_everywhere(model, CALLS["greedy"], by_instruction=True, part=slice(0, None, 43))
    assert num_interruptions > 100


def test_at_lines_of_a_call_that_others_share():
    """Who is interrupted drives others' iterations, or waits for them; they get their rows, whoever drives on."""
    model = orca_hf.wrap(make_model(), CONFIG)
    other = {**pad_left(PROMPTS[:1]), "max_new_tokens": 9, "do_sample": False}
    expected, others = seeded(model, BATCH), model.generate(**other)
    interrupter = Interrupter()
    shared = 0
    counts = distinct(interrupter.places(lambda: seeded(model, BATCH)))
    for place, count in list(counts.items())[::7]:
        results, started = [], threading.Event()

        def run(results=results, started=started):
            started.set()
            results.append(model.generate(**other))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert started.wait(WAIT)
        before = model.generate.engines[0].stats.num_tokens
        interrupter.interrupt(lambda: seeded(model, BATCH), place, count)
        shared += thread.is_alive() and model.generate.engines[0].stats.num_tokens > before
        thread.join(WAIT)
        where = f"{place[0].co_filename}:{place[0].co_qualname}:{place[1]}, time {count}"
        assert not thread.is_alive(), f"a call hangs after an interruption of another at {where}"
        assert torch.equal(results[0], others), where
        assert_whole(model)
    assert shared > 20
    assert seeded(model, BATCH) == expected


def test_at_lines_of_a_wait_for_a_handle():
    """The request goes on, and whoever waits for it next gets its row."""
    model = make_model()
    native = model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=4, do_sample=False)[0]
    engine = orca_hf.engine(model, CONFIG)

    def submit():
        return [engine.submit(PROMPTS[0], max_new_tokens=4, do_sample=False) for _ in range(2)]

    interrupter = Interrupter()
    handles = submit()
    counts = distinct(interrupter.places(handles[0].result))
    for place, count in list(counts.items())[::5]:
        handles = submit()
        raised = interrupter.interrupt(handles[0].result, place, count)
        assert raised is None or isinstance(raised, KeyboardInterrupt)
        for handle in handles:
            row = in_a_thread(handle.result)
            assert isinstance(row, torch.Tensor), (place, row)
            assert torch.equal(row, native)
        assert_whole(model)
    assert len(counts) > 200

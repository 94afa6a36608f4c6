"""Promise: a call that joins others is answered by the model as it is then, as a call that starts alone is."""

import threading

import pytest
import torch
from acting import Criterion, Processor, Streamer
from tiny import PROMPTS, make_model, pad_left
from transformers import LogitsProcessorList, StoppingCriteriaList

import orca_hf
from orca_hf import OrcaConfig

WAIT = 60
CONFIG = OrcaConfig(max_slots=1024, max_batch_size=8)
LONG = {**pad_left(PROMPTS[:2]), "max_new_tokens": 60, "do_sample": False}
BATCH = {**pad_left(PROMPTS), "max_new_tokens": 9, "do_sample": False}


def exchanged_mlp(model):
    model.model.layers[0].mlp = make_model(seed=8).model.layers[0].mlp


def exchanged_attention_weight(model):
    model.model.layers[1].self_attn.o_proj.weight = torch.nn.Parameter(-model.model.layers[1].self_attn.o_proj.weight)


@torch.no_grad()
def written(model):
    model.lm_head.weight.neg_()


def bias_added(model):
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-9, 9, 97))


EDITS = {
    "a head, through .data": lambda model: model.lm_head.weight.data.neg_(),
    "a product in a layer, through .data": lambda model: model.model.layers[0].self_attn.v_proj.weight.data.neg_(),
    "one value, through numpy": lambda model: model.lm_head.weight.detach().numpy().__setitem__((3, 3), 40.0),
    "a norm, through .data": lambda model: model.model.norm.weight.data.neg_(),
    "a head, in place": written,
    "a module": exchanged_mlp,
    "a parameter": exchanged_attention_weight,
    "a bias": bias_added,
}


def while_another_runs(model, act):
    """What `act()` returns, called from this thread while another's call is in the middle of its iterations."""
    there, go_on = threading.Event(), threading.Event()

    def park():
        there.set()
        assert go_on.wait(WAIT)

    errors = []

    def run():
        try:
            model.generate(**LONG, logits_processor=LogitsProcessorList([Processor(park)]))
        except Exception as error:
            errors.append(error)

    other = threading.Thread(target=run, daemon=True)
    other.start()
    assert there.wait(WAIT)
    results = []
    ours = threading.Thread(target=lambda: results.append(act()), daemon=True)
    ours.start()
    engine = model.generate.engines[0]
    while not engine._calls or len(engine._calls) < 2:
        if not ours.is_alive() or (len(model.generate.engines) and model.generate.engines[0] is not engine):
            break
    go_on.set()
    ours.join(WAIT)
    other.join(WAIT)
    assert not ours.is_alive()
    assert not other.is_alive()
    assert errors == []
    return results[0]


@pytest.mark.parametrize("name", EDITS)
def test_a_call_that_joins_has_the_weights_of_now(name):
    plain, model = make_model(), orca_hf.wrap(make_model(), CONFIG)
    for _ in range(3):
        before = model.generate(**BATCH)
    assert model.generate.engines[0].stats.packed_bytes > 0
    EDITS[name](plain)
    expected = plain.generate(**BATCH)
    assert not torch.equal(expected, before)

    def edit_and_call():
        EDITS[name](model)
        return model.generate(**BATCH)

    assert torch.equal(while_another_runs(model, edit_and_call), expected)
    assert torch.equal(model.generate(**BATCH), expected)


def test_a_request_that_joins_has_the_weights_of_now():
    plain, model = make_model(), make_model()
    engine = orca_hf.engine(model, CONFIG)
    model.generate(**BATCH)
    EDITS["a head, through .data"](plain)
    expected = plain.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=9, do_sample=False)[0]

    def edit_and_submit():
        EDITS["a head, through .data"](model)
        return engine.submit(PROMPTS[0], max_new_tokens=9, do_sample=False).result(WAIT)

    assert torch.equal(while_another_runs(model, edit_and_submit), expected)


PLACES = {
    "a processor": lambda act: {"logits_processor": LogitsProcessorList([Processor(act)])},
    "a criterion": lambda act: {"stopping_criteria": StoppingCriteriaList([Criterion(act)])},
    "a streamer": lambda act: {"streamer": Streamer(in_put=act)},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["a head, through .data", "a product in a layer, through .data", "a head, in place"])
def test_an_edit_from_inside_a_call_counts_from_the_next_token_on(name, place):
    results = []
    one = {**pad_left(PROMPTS[:1]), "max_new_tokens": 12, "do_sample": False}
    plain, model = make_model(), orca_hf.wrap(make_model(), CONFIG)
    for _ in range(3):
        model.generate(**BATCH)
    for each in (plain, model):
        results.append(each.generate(**one, **PLACES[place](lambda each=each: EDITS[name](each))))
    assert not torch.equal(results[0], make_model().generate(**one))
    assert torch.equal(results[0], results[1])

"""Promise: a prompt's log-probabilities are a native forward's, in little memory, and iterations run meanwhile."""

import threading

import pytest
import torch
from tiny import ARCHITECTURES, VOCAB, make_model

import orca_hf
from orca_hf.patches import model_lock
from orca_hf.serving import logprobs

PROMPT = [5 + 7 * i % 80 for i in range(31)]
PATIENCE = 30  # seconds after which a test that waits has failed


def natively(model, prompt):
    with torch.no_grad():
        found = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), dim=-1)
    return found[range(len(prompt) - 1), prompt[1:]].tolist()


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_pieces_are_the_whole(model_type, monkeypatch):
    monkeypatch.setattr(logprobs, "_MAX_ROWS", 4)
    model = make_model(model_type)
    expected = natively(model, PROMPT)
    found = logprobs.logprobs_in_pieces(model, torch.tensor([PROMPT]), 3)
    assert [each.logprob for each in found] == pytest.approx(expected, abs=1e-3)
    whole = logprobs.sequence_logprobs(model, torch.tensor([PROMPT]), 3)
    assert [[token for token, _ in each.top] for each in found] == [[token for token, _ in each.top] for each in whole]


def test_no_forward_makes_the_logits_of_a_long_prompt(monkeypatch):
    monkeypatch.setattr(logprobs, "_MAX_ELEMENTS", 5 * VOCAB)
    model = make_model()
    shapes, look = [], logprobs.token_logprobs

    def noting(logits, *args):
        shapes.append(tuple(logits.shape))
        return look(logits, *args)

    monkeypatch.setattr(logprobs, "token_logprobs", noting)
    found = orca_hf.engine(model).prompt_logprobs(PROMPT)[1:]
    assert [each.logprob for each in found] == pytest.approx(natively(model, PROMPT), abs=1e-3)
    assert shapes == [(5, VOCAB)] * 6


@pytest.mark.parametrize("length", [1, 2, 5, 6])
def test_every_length_is_looked_at_whole(length, monkeypatch):
    monkeypatch.setattr(logprobs, "_MAX_ROWS", 5)
    model = make_model()
    first, *others = orca_hf.engine(model).prompt_logprobs(PROMPT[:length])
    assert first is None
    assert [each.logprob for each in others] == pytest.approx(natively(model, PROMPT[:length]), abs=1e-3)


def test_an_iteration_can_run_between_two_pieces(monkeypatch):
    """Another thread takes the model's lock once in each gap."""
    monkeypatch.setattr(logprobs, "_MAX_ROWS", 10)
    model = make_model()
    engine = orca_hf.engine(model)
    taken = []
    look = logprobs.token_logprobs

    def take():
        assert model_lock(model).acquire(timeout=PATIENCE)
        model_lock(model).release()
        taken.append(True)

    def looking(*args):
        other = threading.Thread(target=take)
        other.start()
        other.join(PATIENCE)
        return look(*args)

    monkeypatch.setattr(logprobs, "token_logprobs", looking)
    engine.prompt_logprobs(PROMPT)
    assert len(taken) == 3


def test_a_model_that_keeps_no_cache_is_looked_at_whole(monkeypatch):
    monkeypatch.setattr(logprobs, "_MAX_ROWS", 4)
    model = make_model()
    expected = natively(model, PROMPT)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda input_ids, use_cache, return_dict: forward(input_ids))
    found = logprobs.logprobs_in_pieces(model, torch.tensor([PROMPT]), 0)
    assert [each.logprob for each in found] == pytest.approx(expected, abs=1e-3)

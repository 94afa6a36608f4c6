"""Promise: with `cuda_graphs=True` tokens stay native's, and where graphs cannot be had, `explain` says why.

Without a device, a recording of the operations stands for a graph: a replay that needed anything but what lies in the
captured buffers would give another iteration's tokens.
"""

import threading
from dataclasses import replace

import pytest
import torch
from joined import joined_calls
from recorded_graph import RecordedGraph
from tiny import PROMPTS, make_model, pad_left

import orca_hf
from orca_hf import OrcaConfig
from orca_hf.runner import ModelRunner

CONFIG = OrcaConfig(max_batch_size=8, max_batch_tokens=64, max_slots=1024, block_size=4, cuda_graphs=True)


@pytest.fixture
def graphs(monkeypatch):
    """Recordings in the place of CUDA graphs; counts them."""
    monkeypatch.setattr(ModelRunner, "graph_type", RecordedGraph)
    monkeypatch.setattr(RecordedGraph, "captured", 0)
    monkeypatch.setattr(RecordedGraph, "replayed", 0)
    return RecordedGraph


def stats(model):
    (engine,) = model.generate.engines
    return engine.stats


def prompt_call(prompt, **options):
    return {"input_ids": torch.tensor([prompt]), "do_sample": False, **options}


# Architectures whose attention comes by different ways: windows, softcaps, ALiBi slopes, learned positions, adapters.
TYPES = ["llama", "mistral", "gemma2", "gpt2", "opt", "bloom", "mpt", "falcon:alibi", "gpt_neo", "gpt_neox", "phi3"]


@pytest.mark.parametrize("model_type", TYPES)
def test_tokens_are_natives(graphs, model_type):
    batch = pad_left(PROMPTS)
    expected = make_model(model_type).generate(**batch, max_new_tokens=20, do_sample=False)
    model = orca_hf.wrap(make_model(model_type), CONFIG)
    assert torch.equal(model.generate(**batch, max_new_tokens=20, do_sample=False), expected)
    assert stats(model).no_graphs is None
    assert stats(model).num_graphs == graphs.captured == 1  # 5 rows in a bucket of 8
    assert graphs.replayed > 10


def test_requests_join_and_leave(graphs):
    lengths = [25, 3, 9, 1, 14, 6, 25, 11, 2, 17, 8]
    calls = [
        prompt_call(PROMPTS[i % len(PROMPTS)][: 1 + i % 4], max_new_tokens=length) for i, length in enumerate(lengths)
    ]
    native = make_model()
    first = native.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=24, do_sample=False)
    expected = [first, *(native.generate(**call) for call in calls)]
    model = orca_hf.wrap(make_model(), CONFIG)
    model.generate(**calls[0])
    for _ in range(2):
        together = joined_calls(model, calls)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(together, expected, strict=True))
    assert stats(model).no_graphs is None
    assert stats(model).num_graphs >= 3  # for 8 requests, and for fewer
    assert graphs.replayed > 20


def test_a_longer_context_takes_another_bucket(graphs, monkeypatch):
    monkeypatch.setattr("orca_hf.decode_graphs._MIN_KV_LEN", 8)
    call = prompt_call(PROMPTS[1], max_new_tokens=70)
    expected = make_model().generate(**call)
    model = orca_hf.wrap(make_model(), CONFIG)
    assert torch.equal(model.generate(**call), expected)
    assert stats(model).num_graphs == 5  # K/V up to 8, 16, 32, 64 and 128
    assert stats(model).no_graphs is None


def test_scattered_blocks(graphs):
    calls = [prompt_call(prompt, max_new_tokens=n) for prompt, n in zip(PROMPTS, (5, 30, 5, 30, 40), strict=True)]
    native = make_model()
    expected = [native.generate(**call) for call in calls]
    # Room for little more than two at a time, so that later ones get what earlier ones leave, here and there.
    model = orca_hf.wrap(make_model(), OrcaConfig(**{**vars_of(CONFIG), "max_slots": 80}))
    results = [None] * len(calls)

    def serve(index):
        results[index] = model.generate(**calls[index])

    threads = [threading.Thread(target=serve, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(results, expected, strict=True))
    assert stats(model).no_graphs is None


def vars_of(config):
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def test_padding_rows_write_to_nobodys_memory(graphs):
    model = orca_hf.wrap(make_model(), OrcaConfig(**{**vars_of(CONFIG), "max_slots": 62}))
    model.generate(**pad_left(PROMPTS[:3]), max_new_tokens=4)
    runner = model.generate.engines[0].runner
    assert stats(model).num_slots == 60
    assert runner.pool.num_slots == 68  # 15 blocks of requests, half a block lost to rounding, and one that is nobody's
    bucket = next(iter(runner.graphs._buckets.values()))
    assert bucket.batch.ragged.slot_mapping[3].item() == 64
    assert bucket.batch.ragged.kv_lens.tolist()[3:] == [1]


def test_a_caller_in_inference_mode_leaves_buffers_for_all(graphs):
    batch = pad_left(PROMPTS)
    expected = make_model().generate(**batch, max_new_tokens=9)
    model = orca_hf.wrap(make_model(), CONFIG)
    with torch.inference_mode():
        assert torch.equal(model.generate(**batch, max_new_tokens=9), expected)
    assert torch.equal(model.generate(**batch, max_new_tokens=9), expected)
    assert stats(model).no_graphs is None


@pytest.mark.parametrize("options", [{"do_sample": True, "top_k": 5}, {"repetition_penalty": 1.5}, {"streamer": True}])
def test_other_ways_to_a_token(graphs, options):
    class Ear:
        def __init__(self):
            self.heard = []

        def put(self, value):
            self.heard.append(value.clone())

        def end(self):
            pass

    results, heard = [], []
    for config in (None, CONFIG):
        model = make_model()
        if config is not None:
            orca_hf.wrap(model, config)
        ear = Ear()
        given = {"streamer": ear} if "streamer" in options else options
        torch.manual_seed(3)
        results.append(model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=15, **given))
        heard.append([value.tolist() for value in ear.heard])
    assert torch.equal(*results)
    assert heard[0] == heard[1]
    assert graphs.replayed > 5


CHANGES = {
    "in place": lambda model: model.model.layers[0].mlp.up_proj.weight.data.mul_(-1),
    "a new parameter": lambda model: setattr(
        model.lm_head, "weight", torch.nn.Parameter(model.lm_head.weight.detach().flip(0).contiguous())
    ),
    "through .data": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.flip(0).clone()),
    "what a module keeps in Python": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 5.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_done_to_the_model_is_seen(graphs, name):
    plain, model = make_model(), orca_hf.wrap(make_model(), CONFIG)
    batch = pad_left(PROMPTS)
    before = model.generate(**batch, max_new_tokens=12)
    for each in (plain, model):
        with torch.no_grad():
            CHANGES[name](each)
    expected = plain.generate(**batch, max_new_tokens=12)
    assert not torch.equal(expected, before)
    replayed = graphs.replayed
    assert torch.equal(model.generate(**batch, max_new_tokens=12), expected)
    assert stats(model).no_graphs is None
    assert graphs.replayed > replayed + 8


def test_a_parameter_that_moves_in_the_middle_of_work_is_seen(graphs):
    class Mover:
        def __init__(self, model):
            self.model, self.heard = model, 0

        def put(self, value):
            self.heard += 1
            if self.heard == 6:
                CHANGES["a new parameter"](self.model)

        def end(self):
            pass

    results = []
    for wrapped in (False, True):
        model = make_model()
        if wrapped:
            orca_hf.wrap(model, CONFIG)
        results.append(model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=15, streamer=Mover(model)))
    assert torch.equal(*results)
    assert graphs.captured == 2


def test_release_gives_the_graphs_back(graphs):
    model = orca_hf.wrap(make_model(), CONFIG)
    batch = pad_left(PROMPTS)
    expected = model.generate(**batch, max_new_tokens=9)
    orca_hf.release(model)
    assert stats(model).num_graphs == 0
    assert torch.equal(model.generate(**batch, max_new_tokens=9), expected)
    assert stats(model).num_graphs == 1


class Failing(RecordedGraph):
    def capture(self, run):
        run()
        raise RuntimeError("operation not permitted when stream is capturing")


class Differing(RecordedGraph):
    def replay(self):
        super().replay()
        self._output[:, 5] += 1.0


class NotANumber(RecordedGraph):
    def replay(self):
        self._output.fill_(float("nan"))


GIVEN_UP = [
    (Failing, "RuntimeError: operation not permitted when stream is capturing"),
    (Differing, "the logits of a captured graph differ from a plain iteration's by 1"),
    (NotANumber, "the logits of a captured graph differ from a plain iteration's by nan"),
]


@pytest.mark.parametrize(("graph_type", "reason"), GIVEN_UP, ids=lambda value: getattr(value, "__name__", ""))
def test_a_graph_that_fails_or_differs_is_given_up_and_the_tokens_are_natives(monkeypatch, caplog, graph_type, reason):
    monkeypatch.setattr(ModelRunner, "graph_type", graph_type)
    batch = pad_left(PROMPTS)
    expected = make_model().generate(**batch, max_new_tokens=9)
    model = orca_hf.wrap(make_model(), CONFIG)
    for _ in range(2):
        assert torch.equal(model.generate(**batch, max_new_tokens=9), expected)
    assert stats(model).num_graphs == 0
    assert reason in stats(model).no_graphs
    explanation = orca_hf.explain(model)
    assert explanation.runs_by == "orca"
    assert f"orca, without CUDA graphs: {reason}" in str(explanation)
    assert [record.message for record in caplog.records if "CUDA graphs" in record.message] == [
        f"Orca runs without CUDA graphs: {stats(model).no_graphs}."
    ]
    orca_hf.release(model)
    assert torch.equal(model.generate(**batch, max_new_tokens=9), expected)
    assert reason in stats(model).no_graphs, "what was given up stays so, though the memory was given back"


def test_a_model_that_waits_for_the_device_cannot_be_captured(graphs, monkeypatch):
    model_class = type(make_model().model.norm)
    forward = model_class.forward

    def waits(self, hidden):
        assert hidden.sum().item() < 1e9
        return forward(self, hidden)

    model = orca_hf.wrap(make_model(), replace(CONFIG, trust_modules=(__name__,)))
    monkeypatch.setattr(model_class, "forward", waits)
    batch = pad_left(PROMPTS)
    assert torch.equal(model.generate(**batch, max_new_tokens=9), make_model().generate(**batch, max_new_tokens=9))
    assert "not permitted when a stream is capturing" in stats(model).no_graphs


REFUSED = [
    ({}, "llama", "the model is on cpu"),
    ({"deterministic": True}, "llama", "deterministic=True cuts products into pieces"),
]


@pytest.mark.parametrize(("options", "model_type", "reason"), REFUSED, ids=["cpu", "deterministic"])
def test_explain_says_why_there_are_none(monkeypatch, options, model_type, reason):
    if options:
        monkeypatch.setattr(ModelRunner, "graph_type", RecordedGraph)
    model = orca_hf.wrap(make_model(model_type), OrcaConfig(**{**vars_of(CONFIG), **options}))
    assert str(orca_hf.explain(model)) == f"orca, without CUDA graphs: {reason}"


def test_autocast_is_a_reason_too(graphs):
    model = orca_hf.wrap(make_model(), CONFIG)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert str(orca_hf.explain(model)) == "orca, without CUDA graphs: the model is called under autocast"


def test_nobody_gets_graphs_who_did_not_ask(graphs):
    model = orca_hf.wrap(make_model(), OrcaConfig(max_slots=512))
    model.generate(**pad_left(PROMPTS), max_new_tokens=9)
    assert graphs.captured == 0
    assert (stats(model).num_graphs, stats(model).no_graphs) == (0, None)
    assert str(orca_hf.explain(model)) == "orca"
    assert model.generate.engines[0].runner.graphs is None


def test_chunks_that_only_the_host_can_cut_are_a_reason(graphs, monkeypatch):
    from orca_hf.attention_context import AttentionContext

    batch_on = AttentionContext.batch_on
    monkeypatch.setattr(
        AttentionContext,
        "batch_on",
        lambda self, device, *, attends=False, chunk_size=None: batch_on(
            self, device, attends=attends, chunk_size=128 if attends else None
        ),
    )
    batch = pad_left(PROMPTS)
    model = orca_hf.wrap(make_model(), CONFIG)
    assert torch.equal(model.generate(**batch, max_new_tokens=9), make_model().generate(**batch, max_new_tokens=9))
    assert "cannot be cut into chunks of 128" in stats(model).no_graphs


def test_buckets_are_powers_of_two(graphs):
    model = orca_hf.wrap(make_model(), CONFIG)
    for rows in (1, 2, 3, 5):
        batch = pad_left(PROMPTS[:rows])
        expected = make_model().generate(**batch, max_new_tokens=4)
        assert torch.equal(model.generate(**batch, max_new_tokens=4), expected)
    assert stats(model).num_graphs == 4  # for 1, 2, 4 and 8 rows
    assert model.generate(**batch, max_new_tokens=9).shape == (5, 20)
    assert stats(model).num_graphs == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("model_type", TYPES)
def test_tokens_are_natives_on_a_device(model_type):
    batch = {name: tensor.cuda() for name, tensor in pad_left(PROMPTS).items()}
    expected = make_model(model_type).cuda().generate(**batch, max_new_tokens=20, do_sample=False)
    model = orca_hf.wrap(make_model(model_type).cuda(), CONFIG)
    for _ in range(2):
        assert torch.equal(model.generate(**batch, max_new_tokens=20, do_sample=False), expected)
    assert stats(model).no_graphs is None
    assert stats(model).num_graphs == 1

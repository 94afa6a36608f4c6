"""Promise: a streamer of any kind hears what it hears natively, call by call, and its end also when a call fails."""

import asyncio
import threading

import pytest
import torch
from oracle import SMALL, assert_same, assert_same_outcome, make_twins, num_iterations
from test_stop_strings import TOKENIZERS
from tiny import PROMPTS, make_model, pad_left
from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

import orca_hf

ENDS = {"eos_token_id": list(range(3, 40)), "pad_token_id": 4}
TOKENIZER = TOKENIZERS["bytes"]


@pytest.fixture(scope="module")
def twins():
    return make_twins()


def made(rows=1, **options):
    return {"max_new_tokens": 10, "do_sample": False, **pad_left(PROMPTS[:rows]), **options}


class Recorder(BaseStreamer):
    """Remembers what it was given."""

    def __init__(self):
        self.events = []

    def put(self, value):
        self.events.append((value.dtype, value.device.type, value.tolist()))

    def end(self):
        self.events.append("end")


OPTIONS = {
    "greedy": {},
    "eos": ENDS,
    "sampled": {"do_sample": True, **ENDS},
    "several sequences": {"do_sample": True, "num_return_sequences": 2},
    "processed": {"repetition_penalty": 1.5, **ENDS},
    "scores": {"return_dict_in_generate": True, "output_scores": True, **ENDS},
    "a criterion": {"stopping_criteria": [lambda input_ids, scores: input_ids[:, -1] % 3 == 0]},
    "a criterion that writes": {
        "stopping_criteria": [lambda input_ids, scores: input_ids[:, -1].fill_(5) == 3],
    },
    "one token": {"max_new_tokens": 1},
    "stop strings": {"stop_strings": "e", "tokenizer": TOKENIZER},
    "right padding, natively": {"attention_mask": torch.tensor([[1] * 10 + [0]])},
    "beams": {"num_beams": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "too long": {"max_new_tokens": None, "max_length": 3},
}


@pytest.mark.parametrize("rows", [1, len(PROMPTS)])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_streamer_gets_what_it_gets_natively(twins, name, rows):
    def call(model):
        streamer = Recorder()
        options = dict(OPTIONS[name])
        if "attention_mask" in options:
            options["attention_mask"] = options["attention_mask"].expand(rows, -1)
        try:
            return model.generate(**made(rows, **options), streamer=streamer), streamer.events
        except (ValueError, RuntimeError) as error:
            return type(error), str(error), [event for event in streamer.events if event != "end"]

    assert_same_outcome(twins, call)


@pytest.mark.parametrize("skip_prompt", [True, False])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 5}, ENDS], ids=str)
def test_printed_text_is_natives(twins, capsys, options, skip_prompt):
    printed = []
    before = num_iterations(twins[1])
    for model in twins:
        torch.manual_seed(0)
        model.generate(**made(**options), streamer=TextStreamer(TOKENIZER, skip_prompt=skip_prompt))
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != ""
    assert num_iterations(twins[1]) > before


def test_a_text_streamer_of_several_rows_fails_as_natively(twins):
    assert_same_outcome(twins, lambda model: model.generate(**made(2), streamer=TextStreamer(TOKENIZER)))


def test_iterated_text_is_natives(twins):
    pieces = []
    for model in twins:
        streamer = TextIteratorStreamer(TOKENIZER, skip_prompt=True, timeout=60)
        thread = threading.Thread(target=model.generate, kwargs=made(max_new_tokens=20, streamer=streamer))
        thread.start()
        pieces.append(list(streamer))
        thread.join()
    assert pieces[0] == pieces[1] != []


def test_streams_read_by_turns_are_natives(twins):
    """Eight calls share a batch, and each is read in a thread of its own while it goes on."""
    calls = [made(max_new_tokens=6 + 3 * i, **(ENDS if i % 2 else {})) for i in range(8)]

    def listen(model, call):
        streamer = TextIteratorStreamer(TOKENIZER, timeout=60)
        thread = threading.Thread(target=model.generate, kwargs={**call, "streamer": streamer})
        thread.start()
        return thread, streamer

    native = []
    for call in calls:
        thread, streamer = listen(twins[0], call)
        native.append(list(streamer))
        thread.join()
    started = [listen(twins[1], call) for call in calls]
    assert [list(streamer) for _, streamer in started] == native
    for thread, _ in started:
        thread.join()


def test_text_is_natives_inside_asyncio(twins):
    async def listen(model, call):
        streamer = AsyncTextIteratorStreamer(TOKENIZER, timeout=60)
        generating = asyncio.create_task(asyncio.to_thread(model.generate, **call, streamer=streamer))
        pieces = [piece async for piece in streamer]
        return pieces, await generating

    async def listen_to_all(model):
        calls = [made(max_new_tokens=n) for n in (4, 9, 15)]
        return await asyncio.gather(*(listen(model, call) for call in calls))

    async def one_by_one(model):
        return [await listen(model, made(max_new_tokens=n)) for n in (4, 9, 15)]

    native, ours = asyncio.run(one_by_one(twins[0])), asyncio.run(listen_to_all(twins[1]))
    assert_same(native, list(ours))


def fail(input_ids, scores):
    raise ZeroDivisionError


class FailsAt(Recorder):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def put(self, value):
        super().put(value)
        if len(self.events) == self.call:
            raise OSError("closed pipe")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "options",
    [{"logits_processor": [fail]}, {"stopping_criteria": [fail]}, {"input_ids": torch.tensor([[999]])}],
    ids=["processor", "criterion", "token id"],
)
def test_the_stream_is_ended_when_generation_raises(twins, options, rows):
    """Natively it is not, and who reads it waits for ever."""
    streamer = Recorder()
    call = made(rows, **options)
    if "input_ids" in options:
        del call["attention_mask"]
    with pytest.raises((ZeroDivisionError, IndexError)):
        twins[1].generate(**call, streamer=streamer)
    assert streamer.events[-1] == "end"
    assert streamer.events.count("end") == 1


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_streamer_that_raises_ends_its_call_as_natively(twins, at, rows):
    heard = []
    for model in twins:
        streamer = FailsAt(at)
        with pytest.raises(OSError, match="closed pipe"):
            model.generate(**made(rows), streamer=streamer)
        heard.append([event for event in streamer.events if event != "end"])
    assert heard[0] == heard[1]
    assert_same_outcome(twins, lambda model: model.generate(**made(rows)))


def test_a_reader_of_a_failed_call_is_not_left_waiting():
    model = orca_hf.wrap(make_model(), SMALL)
    streamer = TextIteratorStreamer(TOKENIZER, timeout=60)
    errors = []

    def generate():
        try:
            model.generate(**made(logits_processor=[fail]), streamer=streamer)
        except ZeroDivisionError as error:
            errors.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    assert "".join(streamer) == TOKENIZER.decode(PROMPTS[0])
    thread.join()
    assert len(errors) == 1

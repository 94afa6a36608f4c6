"""orca_hf.pipeline gives what transformers' pipeline gives with batch_size=1, from prompts that run together."""

import _thread
import copy
import itertools
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    TextGenerationPipeline,
)
from transformers.generation.streamers import BaseStreamer
from transformers.pipelines.pt_utils import KeyDataset

from orca_hf.config import OrcaConfig
from orca_hf.errors import CheckpointError, ConfigError, ModelError, OrcaError
from orca_hf.pipelines import OrcaTextGenerationPipeline, pipeline
from orca_hf.wrapping import explain, is_wrapped

WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", "user", "assistant", "system", ":", *(f"w{i}" for i in range(91))]
WORDS += ["abcdef"]  # the word by which transformers looks at a vocabulary for stop strings
TEMPLATE = (
    "{% if tools %}{{ tools | length }} {% endif %}"
    "{% for m in messages %}{{ m.role }} : {{ m.content }}{% if not loop.last or not continue_final_message %} <eos> "
    "{% endif %}{% endfor %}{% if add_generation_prompt %}assistant :{% endif %}"
)
GREEDY = {"do_sample": False, "max_new_tokens": 6}
PROMPTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10 w11", "w12 w13", "w14 w15 w16 w17", "w18 w1 w1 w1"]
CHAT = [{"role": "system", "content": "w1 w2"}, {"role": "user", "content": "w3 w4"}]
PREFILL = [*CHAT, {"role": "assistant", "content": "w5"}]
CHATS = [CHAT, [{"role": "user", "content": "w9"}], PREFILL]
THREADS = "orca-pipeline"


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The model is too small to be worth more, and waiting threads that spin cost minutes on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=50_000,
        initializer_range=0.5,  # large enough that the tokens depend on the prompt
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=[2, *range(20, 30)],  # a tenth of all tokens, so rows end at different lengths
    )
    return LlamaForCausalLM(config).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.model_max_length = 12
    return tokenizer


@pytest.fixture(scope="module")
def native() -> TextGenerationPipeline:
    return transformers.pipeline("text-generation", model=tiny_model(), tokenizer=tiny_tokenizer())


def make_orca(config: OrcaConfig | None = None) -> OrcaTextGenerationPipeline:
    config = config or OrcaConfig(max_batch_size=4, max_slots=200_000)
    return pipeline("text-generation", model=tiny_model(), tokenizer=tiny_tokenizer(), orca_config=config)


@pytest.fixture
def orca() -> OrcaTextGenerationPipeline:
    return make_orca()


@pytest.fixture(scope="module")
def shared() -> OrcaTextGenerationPipeline:
    """For tests that leave it as it is."""
    return make_orca()


class Items(Dataset):
    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Column(Sequence):  # what datasets.Dataset["text"] is
    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]


def materialized(results: Any) -> Any:
    """(whether it was a stream, its content), with tensors as lists."""
    if isinstance(results, list):
        return False, results
    return True, list(results)


INPUTS: dict[str, Callable[[], Any]] = {
    "one": lambda: PROMPTS[0],
    "empty prompt": lambda: "",
    "list": lambda: list(PROMPTS),
    "list of one": lambda: PROMPTS[:1],
    "list with equals": lambda: PROMPTS[:2] * 2,
    "generator": lambda: (prompt for prompt in PROMPTS),
    "empty generator": lambda: (prompt for prompt in ()),
    "dataset": lambda: Items(PROMPTS),
    "key dataset": lambda: KeyDataset(Items([{"text": prompt} for prompt in PROMPTS]), "text"),
    "chat": lambda: copy.deepcopy(CHAT),
    "chat to continue": lambda: copy.deepcopy(PREFILL),
    "chats": lambda: copy.deepcopy(CHATS),
    "chat tuple": lambda: tuple(CHAT),
    "generator of chats": lambda: (chat for chat in CHATS),
    "generator of messages": lambda: (message for message in CHAT),
    "key dataset of chats": lambda: KeyDataset(Items([{"chat": chat} for chat in CHATS]), "chat"),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "new text": {"return_full_text": False},
    "full text": {"return_full_text": True},
    "tensors": {"return_tensors": True},
    "special tokens": {"skip_special_tokens": False, "clean_up_tokenization_spaces": True},
    "two options of the chat": {"continue_final_message": False, "tools": [{"name": "w1"}]},
    "stop": {"stop_sequence": ["w61", "w4"], "max_new_tokens": 12, "eos_token_id": 2},
    "length": {"max_new_tokens": None, "max_length": 20},
    "penalties": {"repetition_penalty": 1.8, "no_repeat_ngram_size": 2, "min_new_tokens": 3},
    "config": {
        "generation_config": GenerationConfig(do_sample=False, max_new_tokens=4, pad_token_id=0),
        "do_sample": None,
    },
    "scores": {"return_dict_in_generate": True, "output_scores": True},
    "beams": {"num_beams": 2, "num_return_sequences": 2},
    "attentions": {"return_dict_in_generate": True, "output_attentions": True},
}
ONLY_FOR_TEXT: dict[str, dict[str, Any]] = {
    "prefix": {"prefix": "w30 w31 "},
    "hole": {"handle_long_generation": "hole"},
    "truncation": {"truncation": True, "tokenizer_encode_kwargs": {"max_length": 3}},
    "added tokens": {"add_special_tokens": True},
}


def same(orca: Any, native: Any, make: Callable[[], Any], **options: Any) -> None:
    options = {key: value for key, value in {**GREEDY, **options}.items() if value is not None}
    if "generation_config" in options:
        options = {key: value for key, value in options.items() if key not in GREEDY}
    (is_stream, ours), (native_is_stream, theirs) = [materialized(pipe(make(), **options)) for pipe in (orca, native)]
    assert is_stream == native_is_stream
    if options.get("output_scores"):  # equal but for rounding
        torch.testing.assert_close(pop_scores(ours), pop_scores(theirs), rtol=1e-4, atol=1e-4)
    assert ours == theirs


def pop_scores(results: Any) -> list[torch.Tensor]:
    if isinstance(results, dict):
        return [torch.tensor(results.pop("scores"))]
    return [scores for result in results for scores in pop_scores(result)]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", INPUTS)
def test_gives_what_transformers_gives(shared: Any, native: Any, shape: str, option: str) -> None:
    same(shared, native, INPUTS[shape], **OPTIONS[option])


@pytest.mark.parametrize("option", ONLY_FOR_TEXT)
@pytest.mark.parametrize("shape", ["one", "list", "generator"])
def test_gives_what_transformers_gives_for_text(shared: Any, native: Any, shape: str, option: str) -> None:
    same(shared, native, INPUTS[shape], **ONLY_FOR_TEXT[option])


def test_options_of_the_constructor_are_the_calls() -> None:
    options = {**GREEDY, "return_full_text": False, "repetition_penalty": 1.5, "prefix": "w30 "}
    native = transformers.pipeline("text-generation", model=tiny_model(), tokenizer=tiny_tokenizer(), **options)
    orca = pipeline("text-generation", tiny_model(), tokenizer=tiny_tokenizer(), look_ahead=2, **options)
    assert orca(PROMPTS) == native(PROMPTS)
    assert list(orca(iter(PROMPTS))) == native(PROMPTS)
    assert orca(PROMPTS[0]) == native(PROMPTS[0])


@pytest.mark.parametrize("batch_size", [1, 2, 3, 100])
@pytest.mark.parametrize("shape", ["list", "generator", "dataset"])
def test_batch_size_changes_no_greedy_result(shared: Any, native: Any, shape: str, batch_size: int) -> None:
    options = {**GREEDY, "max_new_tokens": None, "max_length": 12, "repetition_penalty": 1.5}  # both would see padding
    options = {key: value for key, value in options.items() if value is not None}
    expected = materialized(native(INPUTS[shape](), **options))
    assert materialized(shared(INPUTS[shape](), batch_size=batch_size, **options)) == expected


@pytest.mark.parametrize("shape", ["one", "list of one"])
def test_a_seed_gives_a_single_prompt_the_tokens_it_gives_in_transformers(shared: Any, native: Any, shape: str) -> None:
    inputs = PROMPTS[0] if shape == "one" else PROMPTS[:1]
    results = []
    for pipe in (native, shared):
        transformers.set_seed(3)
        results.append((pipe(inputs, max_new_tokens=5, temperature=1.3), torch.rand(1).item()))
    assert results[0] == results[1]


@pytest.mark.parametrize("shape", ["list", "generator", "chats"])
def test_sampled_prompts_share_a_batch_and_depend_on_the_seed_alone(shared: Any, shape: str) -> None:
    options = {"max_new_tokens": 8, "temperature": 1.3}  # do_sample is the pipeline's default
    slow = make_orca(OrcaConfig(max_batch_size=1, max_batch_tokens=1, max_slots=512))
    results = []
    for pipe, seed, extra in [
        (shared, 3, {}),
        (shared, 3, {"batch_size": 2}),
        (shared, 3, {"look_ahead": 1}),
        (slow, 3, {}),
        (shared, 4, {}),
    ]:
        transformers.set_seed(seed)
        results.append((materialized(pipe(INPUTS[shape](), **options, **extra)), torch.rand(1).item()))
    assert results[0] == results[1] == results[2] == results[3]
    assert results[0][0] != results[4][0]


def test_greedy_calls_leave_the_random_state_that_transformers_leaves(shared: Any, native: Any) -> None:
    transformers.set_seed(3)
    native(list(PROMPTS), **GREEDY)
    expected = torch.rand(1)
    transformers.set_seed(3)
    shared(list(PROMPTS), **GREEDY)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("make", [tuple, Column, iter, lambda prompts: map(str, prompts)])
def test_what_is_like_a_list_or_a_generator_counts_as_one(shared: Any, native: Any, make: Callable[[Any], Any]) -> None:
    results = shared(make(PROMPTS), **GREEDY)
    assert isinstance(results, list) == (make in (tuple, Column))
    assert list(results) == native(PROMPTS, **GREEDY)


def test_a_stream_has_a_length_and_starts_anew(shared: Any, native: Any) -> None:
    stream = shared(Items(PROMPTS), **GREEDY)
    assert len(stream) == len(PROMPTS)
    assert next(iter(stream)) == native(PROMPTS[0], **GREEDY)
    assert list(stream) == list(stream) == native(PROMPTS, **GREEDY)


def rendezvous(orca: OrcaTextGenerationPipeline, num_calls: int) -> None:
    """Let no call run before `num_calls` are there: it fails, by time-out, where they come one at a time."""
    barrier = threading.Barrier(num_calls)
    forward = orca.forward

    def wait_and_forward(*args: Any, **kwargs: Any) -> Any:
        barrier.wait(timeout=20)
        return forward(*args, **kwargs)

    orca.forward = wait_and_forward  # type: ignore[method-assign]


@pytest.mark.parametrize("shape", ["list", "generator", "dataset"])
def test_prompts_share_a_batch(orca: Any, native: Any, shape: str) -> None:
    rendezvous(orca, len(PROMPTS))
    options = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": None}
    assert list(orca(INPUTS[shape](), **options)) == native(PROMPTS, **options)
    (engine,) = explain(orca.model).engines
    assert engine.num_iterations < 0.7 * 40 * len(PROMPTS)  # max_batch_size is 4: a quarter, were nobody late


def test_batch_size_bounds_the_calls_at_a_time(orca: Any) -> None:
    running, most = 0, 0
    lock = threading.Lock()
    forward = orca.forward

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        try:
            return forward(*args, **kwargs)
        finally:
            with lock:
                running -= 1

    orca.forward = count
    orca(PROMPTS * 3, batch_size=3, **GREEDY)
    assert most <= 3


@pytest.mark.parametrize(("look_ahead", "taken_at_most"), [(1, 1), (5, 5), (None, 16)])
def test_an_endless_generator_is_read_no_further_than_look_ahead(
    orca: Any, native: Any, look_ahead: int | None, taken_at_most: int
) -> None:
    num_taken = 0

    def endless() -> Iterator[str]:
        nonlocal num_taken
        for prompt in itertools.cycle(PROMPTS):
            num_taken += 1
            yield prompt

    expected = native(PROMPTS, **GREEDY)
    prompts = endless()
    results = iter(orca(prompts, look_ahead=look_ahead, **GREEDY))
    for index in range(20):
        assert next(results) == expected[index % len(PROMPTS)]
        assert num_taken <= index + taken_at_most + 1  # transformers itself takes one to see whether it is a chat
    results.close()


def test_look_ahead_1_lets_a_prompt_depend_on_the_last_result(orca: Any, native: Any) -> None:
    def conversation(seen: list[Any]) -> Iterator[str]:
        for _ in range(4):
            yield seen[-1]

    def talk(pipe: Any, **options: Any) -> list[Any]:
        seen = ["w1"]
        for result in pipe(conversation(seen), **options, **GREEDY):
            seen.append(result[0]["generated_text"])
        return seen

    assert talk(orca, look_ahead=1) == talk(native)


class RecordingStreamer(BaseStreamer):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(value.tolist())

    def end(self) -> None:
        self.seen.append("end")


def test_a_streamer_sees_one_prompt_after_the_other(orca: Any, native: Any) -> None:
    ours, theirs = RecordingStreamer(), RecordingStreamer()
    assert orca(PROMPTS, streamer=ours, **GREEDY) == native(PROMPTS, streamer=theirs, **GREEDY)
    assert ours.seen == theirs.seen and ours.seen.count("end") == len(PROMPTS)


class ForbidsByCount(LogitsProcessor):
    """Its answer depends on how often it was asked, by any prompt."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.num_calls += 1
        scores[:, self.num_calls % scores.shape[-1] :: 3] = -torch.inf
        return scores


def test_a_processor_with_a_memory_sees_one_prompt_after_the_other(orca: Any, native: Any) -> None:
    results = [
        pipe(PROMPTS, logits_processor=LogitsProcessorList([ForbidsByCount()]), **GREEDY) for pipe in (orca, native)
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({**GREEDY, "num_beams": 2}, "beam"),
        ({**GREEDY, "logits_processor": LogitsProcessorList([ForbidsByCount()])}, "logits_processor"),
    ],
)
def test_the_reason_for_one_at_a_time_is_logged_once(
    orca: Any, caplog: pytest.LogCaptureFixture, options: dict[str, Any], reason: str
) -> None:
    with caplog.at_level(logging.WARNING, "orca_hf.pipelines"):
        orca(PROMPTS[:2], **options)
        orca(PROMPTS[:2], **options)
    messages = [record.getMessage() for record in caplog.records if record.name == "orca_hf.pipelines"]
    assert len(messages) == 1 and reason in messages[0]


def broken(*, after: int) -> Iterator[str]:
    yield from PROMPTS[:after]
    raise LookupError("the source broke")


@pytest.mark.parametrize("after", [1, 2, len(PROMPTS)])
def test_an_error_of_the_generator_comes_after_the_results_before_it(orca: Any, native: Any, after: int) -> None:
    delivered = []
    with pytest.raises(LookupError, match="the source broke"):
        delivered.extend(orca(broken(after=0), **GREEDY))
    with pytest.raises(LookupError, match="the source broke"):
        for result in orca(broken(after=after), **GREEDY):
            delivered.append(result)
    assert delivered == native(PROMPTS[:after], **GREEDY)


# The third prompt fails: in the tokenizer, or in generate() since it is as long as max_length.
FAILURES: list[tuple[list[Any], dict[str, Any]]] = [
    ([*PROMPTS[:2], 3.5, *PROMPTS[3:]], GREEDY),
    (PROMPTS, {"do_sample": False, "max_length": 7}),
]


@pytest.mark.parametrize(("prompts", "options"), FAILURES)
def test_an_error_of_one_prompt_is_transformers_and_comes_in_its_turn(
    orca: Any, native: Any, prompts: list[Any], options: dict[str, Any]
) -> None:
    outcomes = []
    for pipe in (orca, native):
        delivered = []
        with pytest.raises(Exception) as caught:
            for result in pipe((prompt for prompt in prompts), **options):
                delivered.append(result)
        with pytest.raises(caught.type):
            pipe(prompts, **options)
        outcomes.append((delivered, caught.type, str(caught.value)))
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0][0]) == 2
    assert orca(PROMPTS[:2], **GREEDY) == native(PROMPTS[:2], **GREEDY)


def running_threads() -> list[str]:
    """Threads of a pipeline that do not end by themselves. An interrupt may come while one is being started."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(THREADS)]
    for thread in threads:
        thread.join(timeout=20)
    return [thread.name for thread in threads if thread.is_alive()]


LONG = {"do_sample": False, "max_new_tokens": 40_000, "eos_token_id": None}  # minutes, if nobody stopped it


def test_an_interrupt_while_prompts_are_read_leaves_nothing_running(orca: Any) -> None:
    def interrupted() -> Iterator[str]:
        yield from PROMPTS
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(orca(interrupted(), **LONG))
    assert running_threads() == []
    assert [engine.num_admitted + engine.num_waiting for engine in explain(orca.model).engines] == [0]


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """A process started in the background of a shell ignores Ctrl-C, and hands that down."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupt_while_waiting_leaves_nothing_running(orca: Any) -> None:
    started: list[str] = []

    def endless_forward(inputs: Any, *, streamer: BaseStreamer, **_: Any) -> Any:
        started.append(inputs["prompt_text"])
        if len(started) == 2:
            _thread.interrupt_main()
        while True:
            streamer.put(torch.tensor([1]))

    orca.forward = endless_forward
    with pytest.raises(KeyboardInterrupt):
        orca(PROMPTS, batch_size=2, **GREEDY)
    assert running_threads() == []
    assert set(started) == set(PROMPTS[:2])  # the rest was dropped


def test_leaving_the_loop_ends_what_it_started(native: Any) -> None:
    # All of them at once: the threads race, and the first prompt may be the last to arrive.
    orca: Any = make_orca(OrcaConfig(max_batch_size=len(PROMPTS), max_slots=300_000))

    def prompts() -> Iterator[dict[str, Any] | str]:
        yield from PROMPTS

    forward = orca.forward

    def first_is_short(inputs: Any, **params: Any) -> Any:
        return forward(inputs, **(params if inputs["prompt_text"] != PROMPTS[0] else {**params, "max_new_tokens": 2}))

    orca.forward = first_is_short
    stream = orca(prompts(), **LONG)  # held on to, as a caller may
    for result in stream:
        assert result == native(PROMPTS[0], **{**LONG, "max_new_tokens": 2})
        break
    assert running_threads() == []


def test_a_stopped_call_fails_with_the_reason() -> None:
    from orca_hf.concurrent_calls import _Stopper

    stopper = _Stopper()
    stopper.put(torch.tensor([1]))
    stopper.stop()
    with pytest.raises(OrcaError, match="no longer wanted"):
        stopper.put(torch.tensor([1]))


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
    "inference mode": torch.inference_mode,
    "default device": lambda: torch.device("cpu", 0),  # as good as the usual "cpu", but not equal to it
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_callers_pytorch_settings_hold_in_the_calls(orca: Any, name: str) -> None:
    def settings() -> tuple[Any, ...]:
        autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
        return *autocast, torch.is_inference_mode_enabled(), torch.get_default_device()

    seen = []
    forward = orca.forward

    def look(*args: Any, **kwargs: Any) -> Any:
        seen.append(settings())
        return forward(*args, **kwargs)

    orca.forward = look
    stream = orca((prompt for prompt in PROMPTS), **GREEDY)
    with SETTINGS[name]():
        expected = settings()
        for _ in stream:
            pass
    assert seen == [expected] * len(PROMPTS)
    assert settings() != expected


def test_autocast_gives_what_it_gives_natively(shared: Any, native: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        options = {**GREEDY, "max_new_tokens": 2}
        assert shared(PROMPTS, **options) == native(PROMPTS, **options)


class Bar:
    made: "list[Bar]"

    def __init__(self, total: int | None, unit: str) -> None:
        self.total, self.unit, self.num_done, self.closed, self.texts = total, unit, 0, False, []
        Bar.made.append(self)

    def update(self, by: int) -> None:
        self.num_done += by

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        self.texts.append(text)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("options", [GREEDY, {"max_new_tokens": 6}, {"max_new_tokens": 6, "batch_size": 3}])
@pytest.mark.parametrize(("shape", "total"), [("list", 6), ("generator", None), ("dataset", 6)])
def test_progress_counts_prompts_and_tokens(
    shared: Any, monkeypatch: pytest.MonkeyPatch, shape: str, total: int | None, options: dict[str, Any]
) -> None:
    Bar.made = []
    clock = itertools.chain([0.0], itertools.repeat(1.0))  # so tokens per second are tokens
    # Its own clock only: the engine's threads look at the time as well.
    monkeypatch.setattr("orca_hf.pipelines.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    results = list(shared(INPUTS[shape](), progress=Bar, return_tensors=True, **options))
    (bar,) = Bar.made
    assert (bar.total, bar.num_done, bar.closed, bar.unit) == (total, len(PROMPTS), True, "prompt")
    tokens = [token for result in results for token in result[0]["generated_token_ids"] if token != 0]
    prompts = sum(len(prompt.split()) for prompt in PROMPTS)
    assert bar.texts[-1] == f"{len(tokens) - prompts} tokens/s"


def test_progress_true_is_a_tqdm_bar_and_off_by_default(orca: Any, capsys: pytest.CaptureFixture[str]) -> None:
    orca(PROMPTS, **GREEDY)
    assert "prompt" not in capsys.readouterr().err
    orca(PROMPTS, progress=True, **GREEDY)
    assert "6/6" in (shown := capsys.readouterr().err) and "tokens/s" in shown


def test_progress_of_a_loop_that_is_left_is_closed(orca: Any) -> None:
    Bar.made = []
    for _ in orca((prompt for prompt in PROMPTS), progress=Bar, **GREEDY):
        break
    assert Bar.made[0].closed and running_threads() == []


@pytest.mark.parametrize("shape", ["one", "chat"])
def test_options_for_many_are_accepted_for_one(shared: Any, native: Any, shape: str) -> None:
    assert shared(INPUTS[shape](), progress=True, look_ahead=3, **GREEDY) == native(INPUTS[shape](), **GREEDY)


def test_advice_to_batch_is_never_due(orca: Any) -> None:
    for _ in range(12):
        orca(PROMPTS[0], do_sample=False, max_new_tokens=1)
    assert orca.call_count <= 10


def test_is_a_transformers_pipeline_of_the_same_model(orca: Any) -> None:
    model = tiny_model()
    made = pipeline(model=model, tokenizer=tiny_tokenizer(), orca_config=OrcaConfig(max_batch_size=7))
    assert isinstance(made, TextGenerationPipeline) and made.task == "text-generation"
    assert made.model is model and is_wrapped(model) and model.generate.config.max_batch_size == 7
    again = pipeline(model=model, tokenizer=tiny_tokenizer())
    assert again.model.generate.config.max_batch_size == 7  # a wrapped model keeps its settings


def test_transformers_can_make_it_by_class() -> None:
    made = transformers.pipeline(
        "text-generation", model=tiny_model(), tokenizer=tiny_tokenizer(), pipeline_class=OrcaTextGenerationPipeline
    )
    assert is_wrapped(made.model) and made(PROMPTS, **GREEDY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


LOADING: list[dict[str, Any]] = [
    {},
    {"device": -1},
    {"device": "cpu"},
    {"device_map": "auto"},
    {"device_map": "cpu"},
    {"dtype": torch.bfloat16},
    {"dtype": "float16"},
    {"torch_dtype": torch.bfloat16},
    {"model_kwargs": {"dtype": torch.bfloat16}},
    {"model_kwargs": {"attn_implementation": "eager"}},
    {"tokenizer": tiny_tokenizer()},
    {"trust_remote_code": False},
]


@pytest.mark.parametrize("options", LOADING, ids=str)
@pytest.mark.parametrize("as_type", [str, Path])
def test_loads_a_folder_as_transformers_does(folder: Path, options: dict[str, Any], as_type: Any) -> None:
    orca = pipeline("text-generation", as_type(folder), **copy.deepcopy(options))
    native = transformers.pipeline("text-generation", str(folder), **copy.deepcopy(options))
    assert is_wrapped(orca.model) and (orca.device, orca.dtype) == (native.device, native.dtype)
    assert orca.model.config._attn_implementation == native.model.config._attn_implementation
    assert orca.tokenizer.padding_side == native.tokenizer.padding_side
    assert orca(PROMPTS[0], do_sample=False, max_new_tokens=1) == native(PROMPTS[0], do_sample=False, max_new_tokens=1)


ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"task": "fill-mask"}, ConfigError, "text-generation"),
    ({"model": None}, ConfigError, "model is None"),
    ({"pipeline_class": TextGenerationPipeline}, ConfigError, "pipeline_class"),
    ({"device_map": "cpu", "model_kwargs": {"device_map": "cpu"}}, ValueError, "device_map is given twice"),
    ({"dtype": "float16", "model_kwargs": {"torch_dtype": "float16"}}, ValueError, "dtype is given twice"),
    ({"look_ahead": 0}, ConfigError, "look_ahead is 0"),
    ({"look_ahead": True}, ConfigError, "look_ahead is True"),
    ({"progress": 3}, ConfigError, "progress is 3"),
    ({"model": "/no/such/folder"}, CheckpointError, "does not exist"),
    ({"model": torch.nn.Linear(1, 1), "tokenizer": tiny_tokenizer()}, ModelError, "Linear"),
]


@pytest.mark.parametrize(("options", "error", "text"), ARGUMENTS)
def test_arguments_that_cannot_work_are_refused(folder: Path, options: dict[str, Any], error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        pipeline(**{"task": "text-generation", "model": str(folder), **options})


@pytest.mark.parametrize("error", [ConfigError])
def test_another_task_is_a_value_error(error: type[Exception]) -> None:
    assert issubclass(error, ValueError)

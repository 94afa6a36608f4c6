"""Promise: what an answer says of its tokens fits its text, misleads nobody, and is written beside the event loop."""

import asyncio
import json
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from live import FakeEngine, live
from tiny import make_model
from tokenizers_tiny import byte_level, sentencepiece

import orca_hf
from orca_hf.server import completions, json_text
from orca_hf.server.answers import Answer, Answers
from orca_hf.server.logprobs import Logprob, TokenTexts, completion_logprobs
from orca_hf.server.text import Decoder
from orca_hf.serving.logprobs import TokenLogprobs

BYTES = byte_level()
WORDS = sentencepiece(fallback=True)
HIDDEN = BYTES("<bos>aé<eos>😀 b", add_special_tokens=False).input_ids


@pytest.fixture(scope="module")
def served():
    model = make_model()
    with live(orca_hf.engine(model), model, BYTES) as running, running.http() as http:
        yield http


def slices(choice):
    """A choice's text cut where its tokens begin."""
    begins = choice["logprobs"]["text_offset"]
    return [choice["text"][begin:end] for begin, end in zip(begins, [*begins, None][1:], strict=True)]


def test_a_prompts_tokens_are_where_they_are_in_the_text(served):
    given = {"prompt": HIDDEN, "echo": True, "logprobs": 1, "max_tokens": 0}
    (choice,) = served.post("/v1/completions", json=given).json()["choices"]
    assert choice["text"] == "aé😀 b"
    assert slices(choice) == ["", "a", "", "é", "", "", "", "", "😀", " ", "b"]
    assert choice["logprobs"]["tokens"][:2] == ["<bos>", "a"]


@pytest.mark.parametrize("prompt", [HIDDEN, "aé 😀", HIDDEN * 9], ids=["tokens", "text", "several pieces"])
@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("options", [{}, {"stop": ["a", "ok", "s"]}, {"n": 3, "seed": 2}], ids=str)
def test_places_begin_with_the_text_and_never_leave_it(served, prompt, echo, options):
    given = {"prompt": prompt, "echo": echo, "logprobs": 2, "max_tokens": 24, "temperature": 1, "seed": 1, **options}
    whole = served.post("/v1/completions", json=given).json()["choices"]
    for choice in whole:
        begins = choice["logprobs"]["text_offset"]
        assert begins[0] == 0
        assert begins == sorted(begins)
        assert begins[-1] <= len(choice["text"])
        assert "".join(slices(choice)) == choice["text"]
        for token, text in zip(choice["logprobs"]["tokens"], slices(choice), strict=True):
            assert text in ("", token) or token.startswith("bytes:") or options.get("stop")
    if echo and prompt is HIDDEN:
        assert whole[0]["text"].startswith("aé😀 b")
    streamed = {choice["index"]: {"text": "", "text_offset": [], "tokens": []} for choice in whole}
    with served.stream("POST", "/v1/completions", json={**given, "stream": True}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                into = streamed[choice["index"]]
                into["text"] += choice["text"]
                for name in ("text_offset", "tokens"):
                    into[name] += choice["logprobs"][name]
    for choice in whole:
        expected = {"text": choice["text"], **{name: choice["logprobs"][name] for name in ("text_offset", "tokens")}}
        assert streamed[choice["index"]] == expected


def test_tokens_that_a_stop_string_takes_away_begin_where_it_does():
    a, b, x = (BYTES.convert_tokens_to_ids(each) for each in "abx")
    engine = FakeEngine()
    with live(engine, make_model(), BYTES) as running, running.http() as http:
        thread = threading.Thread(target=answer, args=(engine, [x, a, a, a, b]))
        thread.start()
        got = http.post("/v1/completions", json={"prompt": [x], "max_tokens": 9, "stop": "aab", "logprobs": 0}).json()
        thread.join()
    (choice,) = got["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("xa", "stop")
    assert choice["logprobs"]["tokens"] == ["x", "a", "a", "a", "b"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 2, 2]


def test_log_probabilities_that_come_late_are_all_told():
    """As those of native generate() do: here while text is there already, and the last token begins a character."""
    tokens = BYTES("aé", add_special_tokens=False).input_ids

    class Late:
        finish_reason = "length"
        logprobs = ()

        async def __aiter__(self):
            yield tokens[0]
            self.logprobs = tuple(TokenLogprobs(-1.0, ()) for _ in tokens)
            for token in tokens[1:]:
                yield token

        def cancel(self):
            pass

    async def read():
        made = Answers(
            [Answer(0, [], Late())], Decoder(BYTES), stops=(), with_logprobs=True, on_close=lambda closed: None
        )
        return [piece async for piece in made.pieces()]

    pieces = asyncio.run(read())
    assert "".join(piece.text for piece in pieces) == "aé"
    entries = [entry for piece in pieces for entry in piece.logprobs]
    assert [entry.token for entry in entries] == tokens
    assert [entry.offset for entry in entries] == [0, 1, 1]


def answer(engine, tokens):
    (handle,) = engine.wait_for(1)
    handle.logprobs = tuple(TokenLogprobs(-1.0, ((token, -1.0),)) for token in tokens)
    handle.say(*tokens)
    handle.end()


# Two tokens of one text: a piece, and its byte.
SPACE_PIECE, SPACE_BYTE, THE = WORDS.convert_tokens_to_ids(["▁", "<0x20>", "▁the"])
TEXTS = TokenTexts(WORDS)
CASES = {
    "the likeliest of one text has the name": (
        Logprob(THE, -3.0, ((SPACE_BYTE, -1.0), (SPACE_PIECE, -2.0), (THE, -3.0))),
        " the", {" ": -1.0, " the": -3.0},
    ),
    "a chosen one that is the likeliest keeps its name": (
        Logprob(SPACE_PIECE, -1.0, ((SPACE_PIECE, -1.0), (SPACE_BYTE, -2.0))),
        " ", {" ": -1.0},
    ),
    "a chosen one that is not the likeliest has its number": (
        Logprob(SPACE_PIECE, -2.0, ((SPACE_BYTE, -1.0), (SPACE_PIECE, -2.0))),
        f"token_id:{SPACE_PIECE}", {" ": -1.0, f"token_id:{SPACE_PIECE}": -2.0},
    ),
    "a chosen one that is not among the likeliest": (
        Logprob(SPACE_PIECE, -5.0, ((SPACE_BYTE, -1.0), (THE, -2.0))),
        f"token_id:{SPACE_PIECE}", {" ": -1.0, " the": -2.0, f"token_id:{SPACE_PIECE}": -5.0},
    ),
    "equally likely ones": (
        Logprob(SPACE_PIECE, -1.0, ((SPACE_BYTE, -1.0), (SPACE_PIECE, -1.0))),
        " ", {" ": -1.0},
    ),
    "none asked for": (Logprob(THE, -4.0), " the", {" the": -4.0}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_tokens_of_one_text_mislead_nobody(case):
    entry, name, top = CASES[case]
    got = completion_logprobs(TEXTS, [entry])
    assert TEXTS.text(SPACE_PIECE) == TEXTS.text(SPACE_BYTE) == " "
    assert got["tokens"] == [name]
    assert got["top_logprobs"] == [top]
    assert got["top_logprobs"][0][name] == got["token_logprobs"][0]


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0].top])
def test_lm_eval_takes_no_token_for_the_likeliest_that_is_not(case):
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    entry = CASES[case][0]
    first = Logprob(THE, None)
    answer = {"choices": [{"index": 0, "logprobs": completion_logprobs(TEXTS, [first, entry, entry])}]}
    ((logprob, is_greedy),) = LocalCompletionsAPI.parse_logprobs(answer, ctxlens=[1])
    assert logprob == entry.logprob
    assert is_greedy == (entry.logprob == entry.top[0][1])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=30,
)


@given(VALUES, st.integers(0, 6))
def test_json_in_pieces_is_json(value, depth):
    assert "".join(json_text.in_pieces(value, depth)) == json_text.as_json(value)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_long_answer_is_written_beside_the_event_loop_in_short_pieces(served, monkeypatch, path):
    threads, pieces, write, dump = [], [], completions._written, json_text.as_json

    def noting(*args):
        threads.append(threading.current_thread().name)
        monkeypatch.setattr(json_text, "as_json", lambda value: pieces.append(dump(value)) or pieces[-1])
        return write(*args)

    monkeypatch.setattr(completions, "_written", noting)
    is_chat = path.endswith("chat/completions")
    wanted = {"logprobs": True, "top_logprobs": 20} if is_chat else {"logprobs": 20}
    asked = {"messages": [{"role": "user", "content": "k"}]} if is_chat else {"prompt": [5]}
    got = served.post(path, json={**asked, "n": 32, "max_tokens": 16, "seed": 0, **wanted}).json()
    assert len(got["choices"]) == 32
    assert [name.rpartition("_")[0] for name in threads] == ["orca-write"]
    assert max(map(len, pieces)) < 5000


def test_names_of_tokens_are_made_once(monkeypatch):
    made = []
    texts = TokenTexts(BYTES)
    decode = BYTES.decode
    monkeypatch.setattr(BYTES, "decode", lambda tokens, **options: made.append(tokens) or decode(tokens, **options))
    entries = [Logprob(5, -1.0, tuple((token, -1.0) for token in range(3, 23)))] * 50
    completion_logprobs(texts, entries)
    assert len(made) <= 3 * 21


def test_a_long_prompts_log_probabilities_are_natives(served):
    prompt = torch.randint(3, 90, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    given = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0}
    (choice,) = served.post("/v1/completions", json=given).json()["choices"]
    with torch.no_grad():
        expected = torch.log_softmax(make_model()(torch.tensor([prompt])).logits[0], dim=-1)
    expected = expected[range(99), prompt[1:]].tolist()
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=1e-3)

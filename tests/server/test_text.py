"""Promise: text that comes token by token is, joined, the text of the whole; no broken character, no stop string."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tiny import VOCAB
from tokenizers_tiny import KINDS, byte_level

from orca_hf.server.text import Decoder, Detokenizer, StopStrings

DECODERS = {kind: Decoder(tokenizer) for kind, tokenizer in KINDS.items()}
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=24)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def pieces_of(decoder, prompt, tokens):
    detokenizer = Detokenizer(decoder, prompt)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@given(TOKENS)
def test_joined_pieces_are_the_whole_text(kind, tokens):
    assert "".join(pieces_of(DECODERS[kind], [], tokens)) == DECODERS[kind].decode(tokens)


@pytest.mark.parametrize("kind", KINDS)
@given(TOKENS, TOKENS)
def test_an_answer_continues_its_prompt(kind, prompt, tokens):
    before = DECODERS[kind].decode(prompt)
    whole = DECODERS[kind].decode([*prompt, *tokens])
    assume(whole.startswith(before))  # else the prompt ends within a character, which the answer completes
    assert before + "".join(pieces_of(DECODERS[kind], prompt, tokens)) == whole


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback"])
@given(st.text("é😀漢", max_size=8))
def test_no_piece_breaks_a_character(kind, text):
    tokenizer = KINDS[kind]
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    pieces = pieces_of(DECODERS[kind], [], tokens)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_comes_with_its_last_token():
    tokenizer = byte_level()
    assert pieces_of(Decoder(tokenizer), [], tokenizer("é😀k").input_ids) == ["", "é", "", "", "", "😀", "k", ""]


def test_bytes_that_never_become_a_character_come_at_the_end():
    tokenizer = byte_level()
    (broken,) = (i for i in range(VOCAB) if tokenizer.convert_ids_to_tokens(i) == "ÿ")
    assert pieces_of(Decoder(tokenizer), [], [broken, broken]) == ["", "", "\ufffd\ufffd"]


@given(st.text("abc", max_size=16), STOPS, st.data())
def test_stop_strings_are_cut_alike_however_the_text_is_chunked(text, stops, data):
    whole = reference(text, stops)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    finder = StopStrings(stops)
    shown = [finder.push(chunk) for chunk in chunks]
    assert "".join(shown) + finder.flush() == whole
    assert finder.found == any(stop in text for stop in stops)
    # At every moment: all that was shown is part of the answer, and no more is held back than a stop string's length.
    for end in range(len(chunks)):
        assert whole.startswith("".join(shown[: end + 1]))


def reference(text, stops):
    """Character by character: the text up to the stop string that is complete first, the longest of them."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@pytest.mark.parametrize("kind", KINDS)
@given(TOKENS)
def test_places_index_the_text(kind, tokens):
    """Cut at its places, the text is the tokens' own pieces of it: none for a token that it leaves out."""
    decoder = DECODERS[kind]
    text, begins = decoder.text_and_begins(tokens)
    assert text == decoder.decode(tokens)
    assert len(begins) == len(tokens)
    assert begins == sorted(begins)
    assert all(0 <= begin <= len(text) for begin in begins)
    ends = [*begins, len(text)][1:]
    for token, begin, end in zip(tokens, begins, ends, strict=True):
        if decoder.is_hidden(token):
            assert begin == end


def test_a_character_of_several_tokens_is_its_last_ones():
    tokenizer = byte_level()
    tokens = tokenizer("<bos>aé<eos>😀b", add_special_tokens=False).input_ids
    names = tokenizer.convert_ids_to_tokens(tokens)
    assert names == ["<bos>", "a", "Ã", "©", "<eos>", "ð", "Ł", "ĺ", "Ģ", "b"]
    text, begins = Decoder(tokenizer).text_and_begins(tokens)
    assert text == "aé😀b"
    assert begins == [0, 0, 1, 1, 2, 2, 2, 2, 2, 3]


def test_a_run_of_bytes_has_its_characters_where_they_are():
    tokenizer = KINDS["byte fallback"]
    tokens = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in "é漢".encode()] + ["b"])
    text, begins = DECODERS["byte fallback"].text_and_begins(tokens)
    assert text == "é漢b"
    assert begins == [0, 0, 1, 1, 1, 2]


def endless(kind, names):
    tokenizer = KINDS[kind]
    return DECODERS[kind], tokenizer.convert_tokens_to_ids(names)


ENDLESS = {
    "special tokens": endless("byte-level", ["<eos>"] * 5000),
    "spaces": endless("byte-level", ["Ġ"] * 5000),
    "spaces of sentencepiece": endless("sentencepiece", ["▁"] * 5000),
    "double spaces": endless("byte fallback", ["▁▁"] * 5000),
    "broken bytes": endless("byte-level", ["ÿ"] * 5000),
    "beginnings of characters": endless("byte-level", ["ð", "Ł"] * 2500),
    "special tokens and spaces": endless("sentencepiece", ["<eos>", "▁", "<bos>"] * 1700),
    "broken bytes and special tokens": endless("byte-level", ["ÿ", "<eos>", "ð"] * 1700),
    "a special token after spaces": endless("byte fallback", ["▁the", *["▁"] * 40, "<eos>"] * 120),
    "no tokens of the tokenizer": (DECODERS["byte-level"], [10**6] * 5000),
}


@pytest.mark.parametrize("as_prompt", [False, True], ids=["answer", "prompt"])
@pytest.mark.parametrize("case", ENDLESS)
def test_no_answer_makes_what_is_decoded_again_longer(case, as_prompt, monkeypatch):
    decoder, tokens = ENDLESS[case]
    prompt, answer = (tokens, tokens[:200]) if as_prompt else ([], tokens)
    end = 5  # a token with text, behind all that
    expected = decoder.decode([*prompt, *answer, end])
    before = decoder.decode(prompt)
    lengths, decode = [], decoder.decode
    detokenizer = Detokenizer(decoder, prompt)
    monkeypatch.setattr(decoder, "decode", lambda given: lengths.append(len(given)) or decode(given))
    pieces = [detokenizer.push(token) for token in [*answer, end]]
    assert max(lengths) <= 160
    monkeypatch.undo()
    given = "".join([*pieces, detokenizer.flush()])
    if expected.startswith(before):
        assert before + given == expected
    assert len(detokenizer.begins) == len(answer) + 1


def test_a_long_run_of_bytes_is_decoded_once(monkeypatch):
    decoder, tokens = endless("byte fallback", ["<0xC3>", "<0xA9>"] * 4000 + ["b", "s"])
    lengths, decode = [], decoder.decode
    detokenizer = Detokenizer(decoder)
    monkeypatch.setattr(decoder, "decode", lambda given: lengths.append(len(given)) or decode(given))
    assert "".join([detokenizer.push(token) for token in tokens]) == "é" * 4000 + "bs"
    assert sum(lengths) < 8 * len(tokens)
    assert detokenizer.begins[-2:] == [4000, 4001]

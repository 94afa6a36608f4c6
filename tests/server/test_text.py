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

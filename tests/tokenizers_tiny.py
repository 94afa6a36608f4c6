"""Tiny tokenizers of every kind that cuts text in its own way, over the vocabulary of the tiny models."""

from tiny import VOCAB
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
TEXT = 'naïve é 😀 ok, stop! 漢字 ends. {"a":[1,2],"b":"x y"} true\n'
TEMPLATE = (
    "{% for message in messages %}<bos>{{ message['role'][0] }}:{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>a:{% endif %}"
)


def byte_level(size: int = VOCAB) -> PreTrainedTokenizerFast:
    """Tokens of one to three bytes, cut without regard to characters: é and 😀 are several. Has a chat template."""
    byte = bytes_to_unicode()
    data = TEXT.encode()
    singles = [bytes([b]) for b in dict.fromkeys(data + b"abcdefghijklmnopqrstuvwxyz: \xff")]
    pieces = singles + [data[i : i + 2 + i % 2] for i in range(len(data))]
    names = list(dict.fromkeys("".join(byte[b] for b in piece) for piece in pieces))
    vocab = {name: i for i, name in enumerate([*SPECIAL.values(), *names][:size])}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **SPECIAL)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def sentencepiece(*, fallback: bool) -> PreTrainedTokenizerFast:
    """Words with a space before them as ▁, as Llama 2 has them; with `fallback` unknown characters are byte tokens."""
    words = ["▁", "▁the", "▁sea", "s", ".", "▁▁", "▁é", "漢", "\n", "▁a", "b"]
    data = [f"<0x{b:02X}>" for b in dict.fromkeys("😀é漢".encode() + b"\xff ")] if fallback else []
    vocab = [*SPECIAL.values(), "<unk>", *data, *words]
    vocab += [f"▁w{i}" for i in range(VOCAB - len(vocab))]
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate(vocab)}, [], byte_fallback=fallback))
    if fallback:
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **SPECIAL)


def words() -> PreTrainedTokenizerFast:
    """Whole words, which the decoder joins by spaces."""
    vocab = {name: i for i, name in enumerate([*SPECIAL.values(), *(f"w{i}" for i in range(3, VOCAB))])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w3", **SPECIAL)


def wordpiece() -> PreTrainedTokenizerFast:
    """Beginnings of words, and continuations marked ##, with a token that is added and not special."""
    pieces = [f"{'##' if i % 2 else ''}{chr(97 + i % 26)}{i}" for i in range(VOCAB - 6)]
    vocab = {name: i for i, name in enumerate([*SPECIAL.values(), "<unk>", *pieces])}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    backend.add_tokens([AddedToken("<added>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **SPECIAL)


KINDS = {
    "byte-level": byte_level(),
    "sentencepiece": sentencepiece(fallback=False),
    "byte fallback": sentencepiece(fallback=True),
    "words": words(),
    "wordpiece": wordpiece(),
}

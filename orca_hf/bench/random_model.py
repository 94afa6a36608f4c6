"""A tiny model with random weights and a tokenizer of bytes: a server's worst case, since the model costs nothing."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
NUM_POSITIONS = 512


def write_random_model(folder: Path, seed: int) -> None:
    """Writes model and tokenizer as `save_pretrained` does."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: token for token, name in enumerate([*_SPECIAL.values(), *bytes_])}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **_SPECIAL)
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=NUM_POSITIONS,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25, generator=generator)
        # Mostly letters and an end at times, so that answers meet stop strings and end by themselves.
        likely = [token for name, token in vocab.items() if name.isascii() and name.islower()]
        model.lm_head.weight[[*likely, vocab["<eos>"]]] *= 3
    model.save_pretrained(folder)

"""Random calls: some prompts, and a few of generate()'s options beside each other."""

from tiny import VOCAB, pad_left
from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig

MANY = list(range(3, 60))


def some_ids(draw, size):
    return [draw.randrange(1, VOCAB) for _ in range(size)]


# Option: how a value is drawn.
DRAWN = {
    "eos_token_id": lambda draw: draw.choice([33, some_ids(draw, 3), some_ids(draw, 30), MANY]),
    "pad_token_id": lambda draw: draw.choice([0, 7, 33]),
    "min_length": lambda draw: draw.randrange(20),
    "min_new_tokens": lambda draw: draw.randrange(8),
    "repetition_penalty": lambda draw: draw.uniform(0.5, 3),
    "encoder_repetition_penalty": lambda draw: draw.uniform(0.5, 3),
    "no_repeat_ngram_size": lambda draw: draw.randrange(1, 4),
    "encoder_no_repeat_ngram_size": lambda draw: draw.randrange(1, 4),
    "bad_words_ids": lambda draw: [some_ids(draw, draw.randrange(1, 4)) for _ in range(draw.randrange(1, 30))],
    "sequence_bias": lambda draw: [[some_ids(draw, draw.randrange(1, 4)), draw.uniform(-9, 9)] for _ in range(9)],
    "forced_bos_token_id": lambda draw: draw.randrange(VOCAB),
    "forced_eos_token_id": lambda draw: draw.choice([9, some_ids(draw, 2)]),
    "suppress_tokens": lambda draw: some_ids(draw, draw.randrange(1, 60)),
    "begin_suppress_tokens": lambda draw: some_ids(draw, draw.randrange(1, 90)),
    "exponential_decay_length_penalty": lambda draw: (draw.randrange(5), draw.uniform(1, 2)),
    "remove_invalid_values": lambda draw: True,
    "renormalize_logits": lambda draw: True,
    "use_cache": lambda draw: False,
    "max_time": lambda draw: draw.choice([0.0, 100.0]),
    "watermarking_config": lambda draw: draw.choice(
        [WatermarkingConfig(bias=4.0), SynthIDTextWatermarkingConfig(2, some_ids(draw, 4))]),
    "prefix_allowed_tokens_fn": lambda draw: lambda row, ids: list(range((7 * row + len(ids)) % 40, 80)),
    "logits_processor": lambda draw: [lambda ids, scores: scores.roll(ids.shape[1], dims=-1)],
    "stopping_criteria": lambda draw: [lambda ids, scores: ids[:, -1] % 11 == 0],
    "return_dict_in_generate": lambda draw: True,
    "output_scores": lambda draw: True,
    "output_logits": lambda draw: True,
}  # fmt: skip
DRAWN_IF_SAMPLED = {
    "temperature": lambda draw: draw.uniform(0.3, 3),
    "top_k": lambda draw: draw.randrange(0, VOCAB),
    "top_p": lambda draw: draw.uniform(0.3, 1),
    "min_p": lambda draw: draw.uniform(0, 0.2),
    "top_h": lambda draw: draw.uniform(0.3, 1),
    "typical_p": lambda draw: draw.uniform(0.3, 0.99),
    "epsilon_cutoff": lambda draw: draw.uniform(1e-5, 1e-2),
    "eta_cutoff": lambda draw: draw.uniform(1e-5, 1e-2),
    "num_return_sequences": lambda draw: draw.randrange(1, 4),
}


def drawn_call(draw):
    """Some prompts, and up to six options beside each other."""
    prompts = [some_ids(draw, draw.randrange(1, 12)) for _ in range(draw.randrange(1, 5))]
    sampled = draw.random() < 0.5
    pool = {**DRAWN, **(DRAWN_IF_SAMPLED if sampled else {})}
    names = draw.sample(sorted(pool), draw.randrange(1, 7))
    drawn = {name: pool[name](draw) for name in names}
    if "exponential_decay_length_penalty" in drawn:
        drawn.setdefault("eos_token_id", MANY)  # natively it fails without one
    return {**pad_left(prompts), "max_new_tokens": draw.randrange(1, 12), "do_sample": sampled, **drawn}

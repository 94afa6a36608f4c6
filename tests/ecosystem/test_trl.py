"""Promise: TRL's rollouts run by Orca between the optimizer's steps, and what they train is native's, bit for bit."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny import make_model, make_tokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer

import orca_hf
from orca_hf import OrcaConfig

PROMPTS = ["w5 w6 w7", "w8", "w9 w10 w11 w12 w13", "w14 w15"]
NEW_TOKENS = 24
STEPS = 2
ENDS = [2, *range(20, 26)]  # rows of a rollout end at different lengths


def prepare(wrapped):
    model = make_model()
    model.generation_config.eos_token_id = ENDS
    if wrapped:
        orca_hf.wrap(model, OrcaConfig(max_slots=1024))
    return model


def lora(**options):
    return LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"], **options)


def settings(folder, **options):
    common = {"output_dir": str(folder), "use_cpu": True, "bf16": False, "max_steps": STEPS, "learning_rate": 1e-2}
    common |= {"per_device_train_batch_size": 4, "report_to": [], "logging_steps": 1, "save_strategy": "no", "seed": 3}
    return {**common, "disable_tqdm": True, **options}


def losses(trainer):
    return [(entry.get("loss"), entry.get("eval_loss")) for entry in trainer.state.log_history]


def weights(trainer):
    return {name: weight.clone() for name, weight in trainer.model.state_dict().items()}


def roll_out(trainer_type, config_type, wrapped, folder, peft_config=None, evaluate=False, **options):
    """Trains by rollouts; returns model, trainer and the completions of every rollout."""
    completions = []

    def reward(completion_ids, **kwargs):
        completions.append([list(row) for row in completion_ids])
        return [float(len(set(row))) for row in completion_ids]

    model = prepare(wrapped)
    arguments = settings(folder, num_generations=4, max_completion_length=NEW_TOKENS, **options)
    if evaluate:
        arguments |= {"eval_strategy": "steps", "eval_steps": STEPS, "per_device_eval_batch_size": 4}
    trainer = trainer_type(
        model=model,
        args=config_type(**arguments),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 2}),
        eval_dataset=Dataset.from_dict({"prompt": PROMPTS}) if evaluate else None,
        processing_class=make_tokenizer(),
        peft_config=peft_config,
    )
    trainer.train()
    return model, trainer, completions


CASES = {
    "as it comes": {},  # gradient checkpointing is TRL's default
    "without checkpointing": {"gradient_checkpointing": False},
    "evaluated": {"evaluate": True},
    "all warpers": {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8, "repetition_penalty": 1.1},
    "options of generate": {"generation_kwargs": {"no_repeat_ngram_size": 2, "min_new_tokens": 3}},
    "rollouts used twice": {"num_iterations": 2},
    "LoRA": {"peft_config": lora()},
    "LoRA and a reference": {"peft_config": lora(), "beta": 0.1},
}


@pytest.mark.parametrize("name", CASES)
def test_grpo_rolls_out_by_orca_and_trains_what_it_trains_natively(name, tmp_path):
    _, plain, expected = roll_out(GRPOTrainer, GRPOConfig, False, tmp_path, **CASES[name])
    model, trainer, completions = roll_out(GRPOTrainer, GRPOConfig, True, tmp_path, **CASES[name])
    assert completions == expected
    assert losses(trainer) == losses(plain)
    assert_same(weights(trainer), weights(plain))
    assert_rolled_out(model, trainer, completions)


def assert_same(ours, native):
    assert ours.keys() == native.keys()
    for name, weight in native.items():
        assert torch.equal(ours[name], weight), name


def assert_rolled_out(model, trainer, completions):
    """Every completion by Orca, on one engine from the first step to the last."""
    assert len({len(row) for rows in completions for row in rows}) > 1, "rows of different lengths"
    explanation = orca_hf.explain(trainer.model.eval(), generation_config=trainer.generation_config)
    assert explanation.runs_by == "orca", explanation
    (engine,) = explanation.engines
    assert engine.num_iterations >= sum(max(map(len, rows)) for rows in completions)
    assert engine.packed_bytes > 0
    assert model.generate.engines[0].idle


def test_rloo_does_too(tmp_path):
    _, plain, expected = roll_out(RLOOTrainer, RLOOConfig, False, tmp_path, beta=0.0)
    model, trainer, completions = roll_out(RLOOTrainer, RLOOConfig, True, tmp_path, beta=0.0)
    assert completions == expected
    assert_same(weights(trainer), weights(plain))
    assert_rolled_out(model, trainer, completions)


def test_grpo_in_mixed_precision_rolls_out_by_orca(tmp_path):
    """TRL's default. Near ties in bf16 may fall differently; that the K/V are those of autocast is what counts here."""
    model, _, completions = roll_out(GRPOTrainer, GRPOConfig, True, tmp_path, bf16=True)
    (engine,) = model.generate.engines
    assert engine.runner.autocast == ("cpu", torch.bfloat16)
    assert {layer.key.dtype for layer in engine.runner.pool.layers} == {torch.bfloat16}
    assert engine.stats.num_iterations >= sum(max(map(len, rows)) for rows in completions)
    assert len(completions) == STEPS


def test_grpo_with_dropout_rolls_out_natively(tmp_path):
    """Rollouts are made in training mode, so their tokens hang on the dropout's draws."""
    options = {"peft_config": lora(lora_dropout=0.1)}
    _, plain, expected = roll_out(GRPOTrainer, GRPOConfig, False, tmp_path, **options)
    model, trainer, completions = roll_out(GRPOTrainer, GRPOConfig, True, tmp_path, **options)
    assert completions == expected
    assert_same(weights(trainer), weights(plain))
    assert model.generate.engines == ()
    assert "dropout" in str(orca_hf.explain(trainer.model))


def test_packed_weights_follow_grpo(tmp_path):
    """After the last step the model answers as a fresh one with its weights does."""
    model, trainer, _ = roll_out(GRPOTrainer, GRPOConfig, True, tmp_path)
    fresh = make_model()
    untrained = fresh.generate(
        **(options := {"max_new_tokens": 30, "do_sample": False, "inputs": torch.tensor([[5, 6]])})
    )
    fresh.load_state_dict(trainer.model.state_dict())
    expected = fresh.generate(**options)
    assert not torch.equal(expected, untrained)
    assert torch.equal(model.generate(**options, eos_token_id=None), expected)


@pytest.mark.parametrize("peft_config", [None, lora()], ids=["whole", "LoRA"])
def test_sft_leaves_a_model_that_generates_by_orca(peft_config, tmp_path):
    options = {"max_new_tokens": 30, "do_sample": False, "inputs": torch.tensor([[5, 6, 7]])}
    results = []
    for wrapped in (False, True):
        model = prepare(wrapped)
        outputs = [model.generate(**options)]
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(**settings(tmp_path, max_length=16, max_steps=4, learning_rate=0.1)),
            train_dataset=Dataset.from_dict({"text": PROMPTS * 3}),
            processing_class=make_tokenizer(),
            peft_config=peft_config,
        )
        trainer.train()
        trainer.model.eval()
        outputs.append(trainer.model.generate(**options))
        results.append(outputs)
    for native, ours in zip(*results, strict=True):
        assert torch.equal(ours, native)
    assert not torch.equal(*results[0])
    assert orca_hf.explain(trainer.model).runs_by == "orca"
    assert model.generate.engines[0].stats.num_iterations > 0

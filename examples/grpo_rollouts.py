"""TRL's GRPO with rollouts by Orca: one line is added to a training script, and only the rollouts' time changes.

    python examples/grpo_rollouts.py [--model FOLDER] [--steps 2] [--new-tokens 64]

Trains the same steps from the same seeds natively and wrapped, and prints for each how long the rollouts took, and
whether their completions, the losses and the trained weights are the same. The default model is the demo's.

Needs `pip install trl`.
"""

import argparse
import tempfile
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import orca_hf
from orca_hf.demo import PROMPTS, demo_model_folder


class Stopwatch(TrainerCallback):
    """The seconds from the beginning of each training step until `stop`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = 0.0

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        """Called by the trainer."""
        self._start = time.perf_counter()

    def stop(self) -> None:
        """The step's rollouts are there."""
        self.seconds += time.perf_counter() - self._start


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder with a model and its tokenizer; the demo's model if not given")
    parser.add_argument("--steps", type=int, default=2, help="training steps, each with rollouts of its own")
    parser.add_argument("--prompts", type=int, default=2, help="prompts in a step")
    parser.add_argument("--generations", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="longest completion")
    parser.add_argument("--threads", type=int, default=2, help="threads for the matrix products")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.model = arguments.model or str(demo_model_folder())

    native = train(arguments, wrapped=False)
    ours = train(arguments, wrapped=True)
    print(f"rollouts natively  {native['seconds']:7.2f} s  ({native['num_tokens']} tokens)")
    print(f"rollouts by Orca   {ours['seconds']:7.2f} s  {native['seconds'] / ours['seconds']:.2f} times as fast")
    print(f"whole training     {native['whole_s']:7.2f} s natively, {ours['whole_s']:.2f} s wrapped")
    weights = zip(native["weights"], ours["weights"], strict=True)
    print(f"completions equal: {native['completions'] == ours['completions']}")
    print(f"losses equal:      {native['losses'] == ours['losses']}")
    print(f"weights equal:     {all(torch.equal(one, other) for one, other in weights)}")


def train(arguments: argparse.Namespace, *, wrapped: bool) -> dict:
    """The same few steps of GRPO each time; what came of them, and the time in generate()."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    if wrapped:
        orca_hf.wrap(model)  # this is all
    stopwatch = Stopwatch()
    completions: list[list[int]] = []

    def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
        stopwatch.stop()  # in a step the rollouts come first, and then their rewards
        completions.extend(map(list, completion_ids))
        return [len(set(tokens)) / len(tokens) for tokens in completion_ids]

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,  # in fp32 the two are the same to the last bit
                max_steps=arguments.steps,
                learning_rate=1e-5,
                num_generations=arguments.generations,
                per_device_train_batch_size=arguments.prompts * arguments.generations,
                max_completion_length=arguments.new_tokens,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            reward_funcs=reward,
            train_dataset=Dataset.from_dict({"prompt": list(PROMPTS)}),
            processing_class=tokenizer,
            callbacks=[stopwatch],
        )
        start = time.perf_counter()
        trainer.train()
        whole_s = time.perf_counter() - start
    if wrapped:
        print(f"wrapped, generate() runs by {orca_hf.explain(model.eval(), trainer.generation_config)}")
    return {
        "seconds": stopwatch.seconds,
        "whole_s": whole_s,
        "num_tokens": sum(map(len, completions)),
        "completions": completions,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "weights": [weight.detach() for weight in model.parameters()],
    }


if __name__ == "__main__":
    main()

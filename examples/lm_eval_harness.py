"""lm-evaluation-harness on a wrapped model: the same answers and likelihoods, and the answers sooner.

    python examples/lm_eval_harness.py [--model FOLDER] [--batch-size 8] [--new-tokens 64]

Runs a small task of the demo's prompts natively and wrapped: answers until a stop string, and the likelihood of a
given continuation. With a task of your own, all it takes is the wrapped model in place of a model's name:

    lm_eval.simple_evaluate(model=HFLM(pretrained=orca_hf.wrap(model), tokenizer=tokenizer), tasks=["gsm8k"])

Needs `pip install lm-eval`. The default model is the demo's.
"""

import argparse
import time

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

import orca_hf
from orca_hf.demo import PROMPTS, demo_model_folder


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder with a model and its tokenizer; the demo's model if not given")
    parser.add_argument("--batch-size", type=int, default=8, help="rows that the harness puts together")
    parser.add_argument("--new-tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--repeats", type=int, default=3, help="how often each side is timed")
    parser.add_argument("--threads", type=int, default=2, help="threads for the matrix products")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folder = arguments.model or str(demo_model_folder())

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=arguments.batch_size)
    until = {"until": ["\n\n"], "max_gen_toks": arguments.new_tokens, "do_sample": False}
    questions = [Instance("generate_until", {}, (prompt, until), row) for row, prompt in enumerate(PROMPTS)]
    pairs = [Instance("loglikelihood", {}, (prompt, " Yes"), row) for row, prompt in enumerate(PROMPTS)]

    def evaluate() -> tuple[list[str], list[tuple[float, bool]], float]:
        times = []
        for _ in range(arguments.repeats):
            start = time.perf_counter()
            answers = harness.generate_until(questions, disable_tqdm=True)
            times.append(time.perf_counter() - start)
        return answers, harness.loglikelihood(pairs, disable_tqdm=True), sorted(times)[len(times) // 2]

    answers, likelihoods, native_s = evaluate()
    orca_hf.wrap(model)  # this is all
    our_answers, our_likelihoods, our_s = evaluate()
    print(f"wrapped, generate() runs by {orca_hf.explain(model)}")
    print(f"answers natively  {native_s:7.2f} s  (median of {arguments.repeats})")
    print(f"answers by Orca   {our_s:7.2f} s  {native_s / our_s:.2f} times as fast")
    print(f"answers equal:     {sum(map(str.__eq__, answers, our_answers))} of {len(answers)}")
    print(f"likelihoods equal: {likelihoods == our_likelihoods}")


if __name__ == "__main__":
    main()

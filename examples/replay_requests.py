"""Replay a request file through one wrapped model, a thread a request, and print the output tokens per second.

    python examples/replay_requests.py --model FOLDER --requests requests.json [--out tokens.json]

A request file is {"requests": [{"prompt_ids": [int], "max_new_tokens": int}]}; EOS is ignored, so that every request
generates exactly max_new_tokens, as in the Orca paper (section 6.2). Ten threads that call generate() share one batch:
that is all there is to serving requests of different lengths together.
"""

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor

import torch

import orca_hf


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder with safetensors weights")
    parser.add_argument("--requests", required=True, help="a request file")
    parser.add_argument("--out", help="write the generated token ids here as JSON")
    parser.add_argument("--threads", type=int, default=2, help="threads for the matrix products")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    model = orca_hf.load(arguments.model, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    with open(arguments.requests, encoding="utf-8") as file:
        requests = json.load(file)["requests"]

    def run(request: dict) -> list[int]:
        prompt = torch.tensor([request["prompt_ids"]])
        output = model.generate(prompt, max_new_tokens=request["max_new_tokens"], do_sample=False, pad_token_id=2)
        return output[0, prompt.shape[1] :].tolist()

    run({**requests[0], "max_new_tokens": 24})  # long enough that the weights are packed, once for all calls
    start = time.perf_counter()
    with ThreadPoolExecutor(len(requests)) as threads:
        outputs = list(threads.map(run, requests))
    seconds = time.perf_counter() - start
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8") as file:
            json.dump(outputs, file)
    tokens = sum(map(len, outputs))
    result = {"peer": "orca_hf", "requests": len(requests), "output_tokens": tokens, "seconds": round(seconds, 3)}
    print(json.dumps({**result, "output_tok_s": round(tokens / seconds, 2)}))


if __name__ == "__main__":
    main()

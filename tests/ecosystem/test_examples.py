"""Promise: the examples for other libraries run by one command, and show that nothing but time changes."""

import runpy
import sys
from pathlib import Path

import pytest
from tiny import make_model, make_tokenizer

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = {
    "grpo_rollouts.py": (
        ["--steps", "2", "--generations", "4", "--new-tokens", "8"],
        ["runs by orca", "completions equal: True", "losses equal:      True", "weights equal:     True"],
    ),
    "lm_eval_harness.py": (
        ["--repeats", "1", "--new-tokens", "8", "--batch-size", "4"],
        ["runs by orca", "answers equal:     8 of 8", "likelihoods equal: True"],
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_model(max_position_embeddings=512).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_says_that_results_are_equal(name, folder, monkeypatch, capsys):
    options, lines = EXAMPLES[name]
    monkeypatch.setattr(sys, "argv", [name, "--model", folder, "--threads", "1", *options])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    text = capsys.readouterr().out
    for line in lines:
        assert line in text

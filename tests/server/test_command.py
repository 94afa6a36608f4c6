"""Promise: `orca-hf serve` refuses what cannot work before it serves, in one sentence."""

import builtins
import socket

import pytest
from live import PATIENCE
from tiny import make_model
from tokenizers_tiny import byte_level

from orca_hf import cli
from orca_hf.server import command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    make_model("llama").save_pretrained(path)
    byte_level().save_pretrained(path)
    return path


@pytest.fixture
def served(monkeypatch):
    """What would have been served, and how."""
    started = []
    monkeypatch.delenv("ORCA_HF_API_KEY", raising=False)
    monkeypatch.setattr(command.Server, "run", lambda self, sockets: started.append(self))
    yield started
    for server in started:
        server.service.close()


def test_what_is_not_said_is_safe(folder, served, capsys):
    assert cli.main(["serve", str(folder), "--port", "0"]) == 0
    settings = served[0].service.settings
    assert settings.model_names == ("tiny",)
    assert settings.max_model_len == 128
    assert settings.hosts == ("127.0.0.1", "localhost", "::1")
    assert (settings.max_open, settings.grace) == (1024, 30)
    assert "Serving tiny on http://127.0.0.1:" in capsys.readouterr().out


def test_flags_reach_the_engine_and_the_server(folder, served, monkeypatch):
    monkeypatch.setenv("ORCA_HF_API_KEY", "secret")
    flags = "--port 0 --host 0.0.0.0 --max-num-seqs 4 --max-num-batched-tokens 64 --max-slots 256 --max-model-len 100"
    flags += " --served-model-name a b --api-key other --grace 1.5 --max-queue 7 --dtype bfloat16 --deterministic"
    assert cli.main(["serve", str(folder), *flags.split()]) == 0
    settings = served[0].service.settings
    assert settings.model_names == ("a", "b")
    assert settings.api_keys == ("other", "secret")
    assert (settings.hosts, settings.max_open, settings.grace, settings.max_model_len) == (None, 11, 1.5, 100)
    generate = served[0].service.engine._generate
    assert (generate.config.max_batch_size, generate.config.max_batch_tokens, generate.config.max_slots) == (4, 64, 256)
    assert generate.config.deterministic
    assert str(generate.model.dtype) == "torch.bfloat16"


def test_no_answer_is_promised_that_the_memory_cannot_hold(folder, served):
    assert cli.main(["serve", str(folder), "--port", "0", "--max-slots", "64"]) == 0
    assert served[0].service.settings.max_model_len == 64


def test_who_has_read_where_it_serves_can_connect(folder, served, monkeypatch):
    lines = []

    def connect(server, sockets):
        assert lines[-1].startswith("Serving tiny on http://127.0.0.1:")
        socket.create_connection(("127.0.0.1", int(lines[-1].rpartition(":")[2])), PATIENCE).close()
        served.append(server)

    monkeypatch.setattr(command.Server, "run", connect)
    monkeypatch.setattr(cli, "_write", lines.append)
    assert cli.main(["serve", str(folder), "--port", "0"]) == 0
    assert len(served) == 1


WRONG = {
    "no such folder": (["./nowhere"], "does not exist"),
    "open to all": (["FOLDER", "--host", "0.0.0.0"], "--api-key"),
    "too long for the model": (["FOLDER", "--max-model-len", "129"], "the model has 128 positions"),
    "too long for the memory": (["FOLDER", "--max-model-len", "99", "--max-slots", "64"], "K/V memory has 64 slots"),
    "a batch of less than a request each": (["FOLDER", "--max-num-batched-tokens", "2"], "max_batch_tokens is 2"),
    "no such address": (["FOLDER", "--host", "127.0.0.1", "--port", "70000"], "cannot be bound"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_work_is_one_sentence(folder, served, capsys, case):
    words, message = WRONG[case]
    given = [str(folder) if word == "FOLDER" else word for word in words]
    assert cli.main(["serve", *given, *([] if "--port" in given else ["--port", "0"])]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.splitlines()[-1].startswith("orca-hf: ")
    assert served == []


@pytest.mark.parametrize("flags", [["--port", "-1"], ["--grace", "nan"], ["--max-num-seqs", "0"], []])
def test_the_parser_refuses_what_is_no_number(folder, capsys, flags):
    with pytest.raises(SystemExit):
        cli.main(["serve", *([str(folder)] if flags else []), *flags])
    assert "usage: orca-hf serve" in capsys.readouterr().err


def test_without_a_web_server_it_says_what_to_install(folder, monkeypatch, capsys):
    genuine = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "orca_hf.server.command":
            raise ModuleNotFoundError("No module named 'fastapi'", name="fastapi")
        return genuine(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert cli.main(["serve", str(folder)]) == 1
    assert "fastapi is missing" in capsys.readouterr().err

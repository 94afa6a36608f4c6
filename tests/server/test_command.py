"""Promise: `orca-hf serve` refuses what cannot work before it serves, in one sentence."""

import builtins
import logging
import os
import shutil
import socket
import sys
from pathlib import Path

import pytest
from live import PATIENCE, live, wait_until_ready
from tiny import make_model
from tokenizers_tiny import byte_level

import orca_hf
from orca_hf import cli
from orca_hf.errors import OutputError
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


JUDGED = {
    "a port that is none": (["--port", "99999"], "a port is 0 to 65535"),
    "no such host": (["--host", "no.such.host.invalid", "--insecure"], "cannot be bound"),
    "a host that cannot be a name": (["--host", "a..b", "--insecure"], "cannot be bound"),
    "open to all": (["--host", "0.0.0.0"], "--api-key"),
    "no key": (["--api-key", ""], "API key"),
    "fewer tokens than requests": (["--max-num-batched-tokens", "2"], "max_batch_tokens is 2"),
    "blocks of an odd size": (["--block-size", "12"], "power of two"),
    "less than a block": (["--max-slots", "8"], "max_slots is 8"),
    "rows longer than the memory": (["--max-slots", "64", "--max-model-len", "99"], "K/V memory has 64 slots"),
    "a model without a name": (["--served-model-name", ""], "--served-model-name"),
    "a name that no request can have": (["--served-model-name", "n" * 257], "--served-model-name"),
}


@pytest.mark.parametrize("case", JUDGED)
def test_arguments_are_judged_before_anything_is_imported(monkeypatch, capsys, case):
    genuine = builtins.__import__

    def nothing_heavy(name, *args, **kwargs):
        assert name != "orca_hf.server.command", "PyTorch would have been imported"
        return genuine(name, *args, **kwargs)

    monkeypatch.delenv("ORCA_HF_API_KEY", raising=False)
    monkeypatch.setattr(builtins, "__import__", nothing_heavy)
    flags, words = JUDGED[case]
    assert cli.main(["serve", "m", *flags]) == 1
    error = capsys.readouterr().err
    assert error.startswith("orca-hf: ")
    assert error.count("\n") == 1
    assert words in error


NUMBERS = [
    ("--port", "abc", "must be a whole number, at least 0, got 'abc'"),
    ("--port", "80.0", "got '80.0'"),
    ("--max-num-seqs", "0", "must be a whole number, at least 1, got '0'"),
    ("--max-queue", "-1", "must be a whole number, at least 0, got '-1'"),
    ("--grace", "soon", "must be a finite number, at least 0, got 'soon'"),
    ("--grace", "inf", "got 'inf'"),
    ("--client-timeout", "0", "must be a finite number, above 0, got '0'"),
    ("--port", "9" * 5000, "got '999"),
]


@pytest.mark.parametrize(("flag", "given", "words"), NUMBERS)
def test_a_number_that_is_none_is_told_in_words(capsys, flag, given, words):
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "m", flag, given])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert words in error
    assert "_" not in error.splitlines()[-1].replace("orca_hf", "")  # no name of a function
    assert len(error.splitlines()[-1]) < 200


@pytest.mark.parametrize(
    "given",
    ["demo --max-new-tokens x", "bench engine --batch-sizes 1,x", "bench trace --rates x", "bench soak --seed x"],
)
def test_so_it_is_for_every_program(capsys, given):
    with pytest.raises(SystemExit):
        cli.main(given.split())
    last = capsys.readouterr().err.splitlines()[-1]
    assert "got 'x'" in last
    assert "number" in last


BROKEN = {
    name: content
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json")
    for content in [["", "{", "[]", "null", "\x00\x01", '{"a":' + "[" * 9999]]
}
BROKEN["tokenizer.json"] = [*BROKEN["tokenizer.json"], "{}", '{"model": 5}']
BROKEN["chat_template.jinja"] = []


@pytest.mark.parametrize(
    ("name", "content"),
    [(name, content) for name in BROKEN for content in [*BROKEN[name], "version https://git-lfs.github.com/spec/v1\n"]],
    ids=lambda text: text[:12],
)
def test_a_file_that_is_broken_is_named_in_one_line(folder, served, tmp_path, capsys, name, content):
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    (broken / name).write_text(content)
    assert cli.main(["serve", str(broken), "--port", "0"]) == 1
    last = capsys.readouterr().err.split("\r")[-1].splitlines()[-1]
    assert last.startswith("orca-hf: ")
    assert (name if content not in ("{}", '{"model": 5}') else "tokenizer") in last
    assert ("git lfs pull" in last) == content.startswith("version")
    assert served == []


FAILURES = [RuntimeError("two\nlines"), MemoryError(), KeyError("added"), Exception("that very class"), OSError("gone")]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("of", ["orca_hf.load", "transformers.AutoTokenizer.from_pretrained"])
def test_whatever_fails_in_loading_is_one_line(folder, served, monkeypatch, capsys, of, failure):
    def fail(*args, **kwargs):
        raise failure

    monkeypatch.setattr(of, fail)
    assert cli.main(["serve", str(folder), "--port", "0"]) == 1
    last = capsys.readouterr().err.split("\r")[-1].splitlines()[-1]
    assert last.startswith("orca-hf: ")
    assert type(failure).__name__ in last


def test_an_interruption_while_loading_is_no_failure(folder, served, monkeypatch, capsys):
    monkeypatch.setattr(orca_hf, "load", lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt))
    assert cli.main(["serve", str(folder), "--port", "0"]) == 130
    assert capsys.readouterr().err == "orca-hf: interrupted.\n"


@pytest.fixture
def closed_pipe():
    """A standard output that nobody reads any more."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as file:
        yield file


@pytest.mark.parametrize("given", [["serve", "FOLDER", "--port", "0"], ["--help"], ["--version"], ["serve", "--help"]])
def test_a_closed_output_is_told_in_one_line(folder, served, monkeypatch, capsys, closed_pipe, given):
    monkeypatch.setattr(sys, "stdout", closed_pipe)
    words = [str(folder) if word == "FOLDER" else word for word in given]
    assert cli.main(words) == 1
    assert capsys.readouterr().err == "orca-hf: Standard output takes nothing more: Broken pipe.\n"
    closed_pipe.write("nothing of it is left to fail at exit")
    closed_pipe.flush()
    assert served == []


def test_no_output_at_all_is_whats_wanted(folder, served, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)  # as Python starts with a closed one
    assert cli.main(["serve", str(folder), "--port", "0"]) == 0
    assert len(served) == 1


def test_a_server_goes_on_when_nobody_reads_what_it_says():
    def closed(line):
        raise OutputError("Standard output takes nothing more.")

    model = make_model("llama")
    with live(orca_hf.engine(model), model, byte_level(), warm_up=command._while_somebody_reads(closed)) as running:
        assert wait_until_ready(running).status_code == 200


def test_only_noise_is_kept_from_the_log(folder, served, caplog):
    cli.main(["serve", str(folder), "--port", "0"])
    for name, words, kept in [
        ("torchao", "Failed to load _C.so", False),
        ("torchao", "something else", True),
        ("torch.utils._pytree", "Calling register_constant() on Enum subclasses is deprecated", False),
        ("torch.utils._pytree", "something else", True),
        ("orca_hf.loading", "Failed to load what is ours", True),
    ]:
        caplog.clear()
        logger = logging.getLogger(name)
        before, logger.propagate = logger.propagate, True
        logger.warning(words)
        logger.propagate = before
        assert bool(caplog.records) == kept


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

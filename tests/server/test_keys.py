"""Promise: a server with a key answers nobody without it, and one with a key that everybody knows does not start."""

import httpx
import pytest
from live import FakeEngine, faked
from tokenizers_tiny import byte_level

from orca_hf import cli
from orca_hf.errors import ConfigError
from orca_hf.server import command
from orca_hf.server.limits import Guard
from orca_hf.server.settings import ServerSettings

NO_KEYS = {
    "empty": "",
    "a space": " ",
    "a line end": "\n",
    "a space that is not ASCII": "\u2003",
    "a space before": " key",
    "a line end after": "key\n",
    "a space that is not ASCII after": "key\u00a0",
    "a line end within": "one\ntwo",
    "a null": "k\x00y",
    "no text": "k\udc80y",
}
HOSTS = ["127.0.0.1", "0.0.0.0", "::1"]


@pytest.fixture
def never_loaded(monkeypatch):
    """Whoever loads a model has failed the test: it is too late to judge keys then."""
    monkeypatch.delenv("ORCA_HF_API_KEY", raising=False)
    monkeypatch.setattr(command, "_load", lambda *given: pytest.fail("it went on to load the model"))


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("key", NO_KEYS.values(), ids=NO_KEYS)
@pytest.mark.parametrize("others", [[], ["--api-key", "good"], ["--insecure"]])
def test_a_key_that_is_none_does_not_start_a_server(never_loaded, capsys, host, key, others):
    assert cli.main(["serve", "m", "--host", host, "--port", "0", f"--api-key={key}", *others]) == 1
    assert capsys.readouterr().err.startswith("orca-hf: An API key ")


@pytest.mark.parametrize("key", ["", " ", "key\n"])
@pytest.mark.parametrize("host", HOSTS)
def test_nor_does_one_from_the_environment(never_loaded, monkeypatch, capsys, host, key):
    monkeypatch.setenv("ORCA_HF_API_KEY", key)
    assert cli.main(["serve", "m", "--host", host, "--port", "0"]) == 1
    assert capsys.readouterr().err.startswith("orca-hf: An API key ")


@pytest.mark.parametrize("keys", [*([key] for key in NO_KEYS.values()), ["good", ""], "secret"])
def test_settings_and_the_guard_itself_refuse_it(keys):
    with pytest.raises(ConfigError):
        ServerSettings(model_names=("m",), max_model_len=8, api_keys=keys)
    with pytest.raises(ConfigError):
        Guard(None, api_keys=keys, hosts=None, max_body_bytes=8)


@pytest.mark.parametrize("key", ["plain", "two words", "ключ", "à", "日本", "a" * 4096])
def test_every_key_that_can_be_sent_opens_and_nothing_else(key):
    with faked(FakeEngine([5]), byte_level(), api_keys=(key,)) as running:
        for sent, status in [(key, 200), (f" {key}", 200), (key[:-1].rstrip(), 401), ("", 401), (key + "x", 401)]:
            headers = {"Authorization": f"Bearer {sent}".rstrip().encode()}
            assert httpx.get(f"{running.url}/v1/models", headers=headers).status_code == status

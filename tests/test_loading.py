"""load() gives a wrapped model with exactly the weights of the files, or says which file and tensor is wrong."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

from orca_hf.checkpoint import read_header
from orca_hf.config import OrcaConfig
from orca_hf.errors import CheckpointError, ConfigError, ModelError
from orca_hf.loading import load
from orca_hf.wrapping import is_wrapped

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "intermediate_size": 32, "num_key_value_heads": 1, **changes}))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model, whole and in shards."""
    root = tmp_path_factory.mktemp("saved")
    tiny_llama().save_pretrained(root / "whole")
    tiny_llama().save_pretrained(root / "shards", max_shard_size="4KB")
    return root


@pytest.fixture
def whole(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "whole", tmp_path / "whole"))


@pytest.fixture
def shards(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "shards", tmp_path / "shards"))


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def edit_config(folder: Path, **changes: Any) -> None:
    edit_json(folder / "config.json", lambda config: config.update(changes))


def edit_header(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def shard_of(folder: Path, tensor: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][tensor]


def assert_same_weights(model: PreTrainedModel, expected: PreTrainedModel) -> None:
    actual = model.state_dict()
    assert actual.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(actual[name].cpu(), tensor), name


@pytest.mark.parametrize("layout", ["whole", "shards"])
@pytest.mark.parametrize("device_map", ["auto", None, "cpu", {"": "cpu"}])
def test_gives_the_saved_weights_wrapped_in_eval_mode(saved: Path, layout: str, device_map: Any) -> None:
    config = OrcaConfig(max_batch_size=3)
    model = load(saved / layout, device_map=device_map, config=config)
    assert type(model) is LlamaForCausalLM and not model.training
    assert is_wrapped(model) and model.generate.config == config
    assert_same_weights(model, tiny_llama())


def test_generates_what_the_saved_model_generates(saved: Path) -> None:
    prompt = torch.tensor([[5, 6, 7]])
    expected = tiny_llama().eval().generate(prompt, do_sample=False, max_new_tokens=6)
    assert torch.equal(load(str(saved / "shards")).generate(prompt, do_sample=False, max_new_tokens=6), expected)


def test_offloads_to_disk_as_from_pretrained_does(saved: Path, tmp_path: Path) -> None:
    parts = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    device_map = {**dict.fromkeys(parts, "cpu"), "model.layers.1": "disk"}
    model = load(saved / "shards", device_map=device_map, offload_folder=tmp_path / "offload")
    assert model.hf_device_map == device_map
    prompt = torch.tensor([[5, 6, 7]])
    expected = tiny_llama().eval().generate(prompt, do_sample=False, max_new_tokens=3)
    assert torch.equal(model.generate(prompt, do_sample=False, max_new_tokens=3), expected)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_takes_both_names_of_dtype(saved: Path, name: str) -> None:
    assert load(saved / "whole", **{name: torch.bfloat16}).dtype == torch.bfloat16


def test_auto_dtype_is_the_checkpoints(tmp_path: Path) -> None:
    tiny_llama().to(torch.float16).save_pretrained(tmp_path)
    assert load(tmp_path).dtype == torch.float16


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / ONE_FILE)
    model = load(tmp_path)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_tensor_too_many_is_no_error(whole: Path) -> None:
    edit_tensors(whole / ONE_FILE, lambda tensors: tensors.update(extra=torch.zeros(2)))
    assert_same_weights(load(whole), tiny_llama())


def test_finds_variant_and_subfolder(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "sub", variant="odd", max_shard_size="4KB")
    assert (tmp_path / "sub" / "model.safetensors.index.odd.json").is_file()
    assert_same_weights(load(tmp_path, subfolder="sub", variant="odd"), tiny_llama())


def test_loads_from_the_hub_cache(saved: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--tiny"
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = Path(shutil.copytree(saved / "shards", repository / "snapshots" / commit))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    assert_same_weights(load("org/tiny", cache_dir=tmp_path, local_files_only=True), tiny_llama())

    shard = shard_of(snapshot, NORM)
    cut(shard, shard.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=f"{shard.name} is truncated"):
        load("org/tiny", cache_dir=tmp_path, local_files_only=True)
    shard.unlink()
    with pytest.raises(CheckpointError, match="cannot be fetched"):
        load("org/tiny", cache_dir=tmp_path, local_files_only=True)
    for path in snapshot.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"none of model\.safetensors"):
        load("org/tiny", cache_dir=tmp_path, local_files_only=True)


def test_a_repository_with_pickles_only_is_refused_by_the_files_it_lists(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = saved / "whole" / "config.json"
    monkeypatch.setattr("orca_hf.loading.AutoConfig.from_pretrained", lambda *_, **__: tiny_llama().config)
    monkeypatch.setattr("orca_hf.loading.cached_file", lambda _, name, **__: config if name == config.name else None)
    monkeypatch.setattr("orca_hf.loading.is_offline_mode", lambda: False)
    files = ["config.json", "pytorch_model.bin"]
    monkeypatch.setattr("orca_hf.loading.HfApi.list_repo_files", lambda *_, **__: files)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*save_pretrained"):
        load("org/pickles")


def swap_for_pickle(folder: Path, name: str) -> None:
    torch.save(load_file(folder / ONE_FILE), folder / name)
    (folder / ONE_FILE).unlink()


def overwrite(folder: Path, data: bytes) -> None:
    (folder / ONE_FILE).write_bytes(data)


WHOLE: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "pickle": (lambda f: swap_for_pickle(f, "pytorch_model.bin"), ("pytorch_model.bin", "save_pretrained")),
    "pt": (lambda f: swap_for_pickle(f, "weights.pt"), ("weights.pt", "save_pretrained")),
    "ckpt": (lambda f: swap_for_pickle(f, "last.ckpt"), ("last.ckpt", "save_pretrained")),
    "other name": (lambda f: (f / ONE_FILE).rename(f / "own.safetensors"), ("own.safetensors", ONE_FILE)),
    "no weights": (lambda f: (f / ONE_FILE).unlink(), ("no weights", ONE_FILE)),
    "no config": (lambda f: (f / "config.json").unlink(), ("config.json",)),
    "config not JSON": (lambda f: (f / "config.json").write_text("{"), ("config.json", "JSON")),
    "empty file": (lambda f: overwrite(f, b""), (ONE_FILE, "truncated")),
    "cut in header": (lambda f: cut(f / ONE_FILE, 100), (ONE_FILE, "truncated")),
    "cut in data": (lambda f: cut(f / ONE_FILE, (f / ONE_FILE).stat().st_size - 1), (ONE_FILE, "truncated", NORM)),
    "cut after header": (
        lambda f: cut(f / ONE_FILE, 8 + struct.unpack("<Q", (f / ONE_FILE).read_bytes()[:8])[0]),
        (ONE_FILE, "truncated", "lm_head.weight"),
    ),
    "trailing bytes": (lambda f: overwrite(f, (f / ONE_FILE).read_bytes() + b"xy"), (ONE_FILE, "2 bytes")),
    "a pickle by that name": (lambda f: overwrite(f, b"\x80\x04\x95" + b"x" * 64), (ONE_FILE, "not a safetensors")),
    "header not JSON": (lambda f: overwrite(f, struct.pack("<Q", 4) + b"{{{{"), (ONE_FILE, "not JSON")),
    "header a list": (lambda f: overwrite(f, struct.pack("<Q", 2) + b"[]"), (ONE_FILE, "not a JSON object")),
    "entry without offsets": (
        lambda f: edit_header(f / ONE_FILE, lambda h: h[NORM].pop("data_offsets")),
        (ONE_FILE, NORM, "entry"),
    ),
    "offsets of a wrong size": (
        lambda f: edit_header(f / ONE_FILE, lambda h: h[NORM].update(shape=[3])),
        (ONE_FILE, NORM, "12 bytes"),
    ),
    "offsets with a hole": (
        lambda f: edit_header(f / ONE_FILE, lambda h: h.pop("lm_head.weight")),
        (ONE_FILE, "starts"),
    ),
    "tensor missing": (lambda f: edit_tensors(f / ONE_FILE, lambda t: t.pop(NORM)), (ONE_FILE, NORM)),
    "untied head missing": (
        lambda f: edit_tensors(f / ONE_FILE, lambda t: t.pop("lm_head.weight")),
        (ONE_FILE, "lm_head.weight"),
    ),
    "many missing": (
        lambda f: edit_tensors(f / ONE_FILE, lambda t: [t.pop(n) for n in list(t) if "layers.1" in n]),
        (ONE_FILE, "model.layers.1.", "and 4 more"),
    ),
    "wrong shape": (
        lambda f: edit_tensors(f / ONE_FILE, lambda t: t.update({NORM: torch.zeros(8)})),
        (ONE_FILE, f"{NORM} [8] (the model: [16])"),
    ),
    "another vocabulary": (lambda f: edit_config(f, vocab_size=65), (ONE_FILE, "lm_head.weight", "[65, 16]")),
}

SHARDS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "shard missing": (lambda f: shard_of(f, NORM).unlink(), ("model-0000", "is missing", NORM)),
    "shard cut": (
        lambda f: cut(shard_of(f, NORM), shard_of(f, NORM).stat().st_size - 1),
        ("model-0000", "truncated", NORM),
    ),
    "tensor not in its shard": (
        lambda f: edit_tensors(shard_of(f, NORM), lambda t: t.pop(NORM)),
        ("model-0000", "lacks", NORM, INDEX),
    ),
    "tensor in no shard": (
        lambda f: (
            edit_tensors(shard_of(f, NORM), lambda t: t.pop(NORM)),
            edit_json(f / INDEX, lambda i: i["weight_map"].pop(NORM)),
        ),
        ("shards", NORM),
    ),
    "wrong shape": (
        lambda f: edit_tensors(shard_of(f, NORM), lambda t: t.update({NORM: torch.zeros(8)})),
        (f"{NORM} [8] (the model: [16])",),
    ),
    "index not JSON": (lambda f: (f / INDEX).write_text("{"), (INDEX, "JSON")),
    "index a list": (lambda f: (f / INDEX).write_text("[]"), (INDEX,)),
    "index without map": (lambda f: edit_json(f / INDEX, lambda i: i.pop("weight_map")), (INDEX, "weight_map")),
    "index with a number": (
        lambda f: edit_json(f / INDEX, lambda i: i["weight_map"].update({NORM: 3})),
        (INDEX, NORM, "3"),
    ),
    "index that leaves the folder": (
        lambda f: edit_json(f / INDEX, lambda i: i["weight_map"].update({NORM: "../x.safetensors"})),
        (INDEX, NORM, "../x.safetensors"),
    ),
    "index of a pickle": (
        lambda f: edit_json(f / INDEX, lambda i: i["weight_map"].update({NORM: "x.bin"})),
        (INDEX, NORM, "x.bin"),
    ),
}


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22\nsize 2336927\n"
NAMES_OF_POINTERS = ["config.json", "generation_config.json", INDEX, "a shard", ONE_FILE]


@pytest.mark.parametrize("name", NAMES_OF_POINTERS)
def test_what_git_lfs_left_in_a_files_place_is_named(whole: Path, shards: Path, name: str) -> None:
    folder = whole if name == ONE_FILE else shards
    path = shard_of(folder, NORM) if name == "a shard" else folder / name
    path.write_text(LFS)
    assert_refused(folder, (path.name, "git-lfs", "git lfs pull"))


BROKEN = {"nothing": "", "half": "{", "a list": "[]", "null": "null", "bytes": "\x00", "too deep": '{"a":' + "[" * 9999}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_configuration_that_is_none_is_named(whole: Path, name: str, content: str) -> None:
    (whole / name).write_text(content)
    assert_refused(whole, (name, "JSON"))


def save_tied(folder: Path, **changes: Any) -> None:
    tiny_llama(tie_word_embeddings=True, **changes).save_pretrained(folder, max_shard_size="4KB")


def name_in_index(folder: Path, tensor: str, beside: str) -> None:
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({tensor: shard_of(folder, beside).name}))


def test_a_tied_weight_that_only_the_index_names_is_where_it_is_natively(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tied(tmp_path)
    name_in_index(tmp_path, "lm_head.weight", NORM)
    native = AutoModelForCausalLM.from_pretrained(tmp_path)
    model = load(tmp_path)
    assert_same_weights(model, native)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert any("lm_head.weight" in record.getMessage() for record in caplog.records if record.name == "orca_hf.loading")


ONLY_IN_INDEX: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "a weight that is not tied": (lambda f: (save_tied(f), name_in_index(f, "model.extra.weight", NORM)), ("extra",)),
    "a head that is not tied": (
        lambda f: (
            tiny_llama().save_pretrained(f, max_shard_size="4KB"),
            edit_tensors(shard_of(f, "lm_head.weight"), lambda t: (t.pop("lm_head.weight"), t.update(x=torch.ones(1)))),
        ),
        ("lm_head.weight", INDEX),
    ),
    "what the head is tied to": (
        lambda f: (
            save_tied(f),
            name_in_index(f, "lm_head.weight", NORM),
            edit_tensors(
                shard_of(f, "model.embed_tokens.weight"),
                lambda t: (t.pop("model.embed_tokens.weight"), t.update(x=torch.ones(1))),
            ),
        ),
        ("model.embed_tokens.weight",),
    ),
}


@pytest.mark.parametrize("case", ONLY_IN_INDEX)
def test_what_else_only_the_index_names_is_missing(tmp_path: Path, case: str) -> None:
    do, fragments = ONLY_IN_INDEX[case]
    do(tmp_path)
    assert_refused(tmp_path, fragments)


def assert_refused(folder: Path, fragments: tuple[str, ...], **kwargs: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(folder, **kwargs)
    assert [fragment for fragment in fragments if fragment not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize("damage", WHOLE)
def test_damage_to_a_file_is_named(whole: Path, damage: str) -> None:
    do, fragments = WHOLE[damage]
    do(whole)
    assert_refused(whole, fragments)


@pytest.mark.parametrize("damage", SHARDS)
def test_damage_to_shards_is_named(shards: Path, damage: str) -> None:
    do, fragments = SHARDS[damage]
    do(shards)
    assert_refused(shards, fragments)


@pytest.mark.parametrize("damage", ["wrong shape", "another vocabulary"])
def test_ignore_mismatched_sizes_makes_up_no_weight(whole: Path, damage: str) -> None:
    do, fragments = WHOLE[damage]
    do(whole)
    assert_refused(whole, fragments, ignore_mismatched_sizes=True)


@pytest.mark.parametrize("weights", [("w1",), ("w1", "w2", "w3")])
def test_an_expert_that_is_missing_is_refused(tmp_path: Path, weights: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    config = MixtralConfig(**{**SIZES, "num_hidden_layers": 1}, intermediate_size=32, num_local_experts=4)
    config.num_key_value_heads = 1
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    names = [f"model.layers.0.block_sparse_moe.experts.2.{weight}.weight" for weight in weights]
    edit_tensors(tmp_path / ONE_FILE, lambda tensors: [tensors.pop(name) for name in names])
    assert_refused(tmp_path, (ONE_FILE,))


def test_header_gives_where_the_tensors_lie(saved: Path) -> None:
    path = saved / "whole" / ONE_FILE
    places = read_header(str(path))
    assert places.keys() == load_file(path).keys()
    assert sorted(places.values())[0][0] == 0
    assert all(stop - start == load_file(path)[name].nbytes for name, (start, stop) in places.items())


def save_config(folder: Path, **changes: Any) -> None:
    tiny_llama().save_pretrained(folder)
    edit_config(folder, **changes)


def save_other(folder: Path, kind: str) -> None:
    small: dict[str, Any] = {**SIZES, "intermediate_size": 32}
    models: dict[str, Callable[[], PreTrainedModel]] = {
        "bert": lambda: BertForSequenceClassification(BertConfig(**small)),
        "vit": lambda: ViTModel(ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=32)),
        "t5": lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        ),
    }
    models[kind]().save_pretrained(folder)


REMOTE = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
NOT_CAUSAL: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "classifier": (lambda f: save_other(f, "bert"), ("BertForSequenceClassification", "classifier")),
    "vision": (lambda f: save_other(f, "vit"), ("vit", "ViTModel")),
    "encoder-decoder": (lambda f: save_other(f, "t5"), ("t5", "T5ForConditionalGeneration")),
    "unknown type": (lambda f: save_config(f, model_type="nosuch"), ("nosuch",)),
    "no type": (lambda f: (f / "config.json").write_text("{}"), ("model_type",)),
    "own code": (lambda f: save_config(f, model_type="own", auto_map=REMOTE), ("trust_remote_code=True",)),
    "field of a wrong type": (lambda f: save_config(f, vocab_size="many"), ("vocab_size", "many")),
    "sizes that contradict": (lambda f: save_config(f, num_attention_heads=3), ("16", "3")),
}


@pytest.mark.parametrize("kind", NOT_CAUSAL)
def test_what_is_no_causal_language_model_is_a_model_error(tmp_path: Path, kind: str) -> None:
    do, fragments = NOT_CAUSAL[kind]
    do(tmp_path)
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    assert [fragment for fragment in fragments if fragment not in str(caught.value)] == [], str(caught.value)


def test_code_of_the_repository_runs_only_when_trusted(whole: Path) -> None:
    (whole / "own.py").write_text("raise RuntimeError('the code ran')")
    edit_config(whole, model_type="own", auto_map=REMOTE)
    with pytest.raises(ModelError, match="trust_remote_code=True"):
        load(whole)
    with pytest.raises(RuntimeError, match="the code ran"):
        load(whole, trust_remote_code=True)


ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"use_safetensors": False}, CheckpointError, "save_pretrained"),
    ({"gguf_file": "model.gguf"}, CheckpointError, "gguf"),
    ({"from_tf": True}, CheckpointError, "from_tf"),
    ({"output_loading_info": True}, ConfigError, "output_loading_info"),
    ({"config": LlamaConfig()}, ConfigError, "OrcaConfig"),
    ({"variant": "none"}, CheckpointError, r"model\.none\.safetensors"),
]


@pytest.mark.parametrize(("kwargs", "error", "text"), ARGUMENTS)
def test_arguments_that_cannot_work_are_refused(saved: Path, kwargs: dict[str, Any], error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        load(saved / "whole", **kwargs)


def test_use_safetensors_true_is_what_happens_anyway(saved: Path) -> None:
    assert_same_weights(load(saved / "whole", use_safetensors=True), tiny_llama())


@pytest.mark.parametrize(
    "path", ["/no/such/folder", "./none", "../none", "~/no-such-model", "a/b/c", "none/", "C:\\m", ""]
)
def test_a_path_that_does_not_exist_is_said_to_be_one(path: str) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load(path)


def test_a_path_object_is_never_a_hub_id() -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load(Path("org/none"))


def test_a_file_is_not_a_folder(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="is a file"):
        load(saved / "whole" / ONE_FILE)


def test_a_hub_id_that_cannot_be_had_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="org/none"):
        load("org/none", cache_dir=tmp_path, local_files_only=True)


def test_an_adapter_without_peft_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orca_hf.loading.is_peft_available", lambda: False)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    with pytest.raises(CheckpointError, match="pip install peft"):
        load(tmp_path)


def test_an_adapter_is_loaded_onto_its_base(saved: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = load(saved / "whole")
    torch.manual_seed(1)
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))
    adapted.save_pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = adapted(ids).logits
        assert torch.allclose(load(tmp_path)(ids).logits, expected)

    weights = tmp_path / "adapter_model.safetensors"
    edit_tensors(weights, lambda tensors: tensors.pop(sorted(tensors)[0]))
    assert_refused(tmp_path, ("adapter_model.safetensors", "q_proj"))
    weights.rename(tmp_path / "adapter_model.bin")
    assert_refused(tmp_path, ("adapter_model.bin",))

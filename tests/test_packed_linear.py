"""Promises of packed weights: the linear's own results, and never a copy that outlives its weight."""

import pytest
import torch
from tiny import PROMPTS, make_model, pad_left
from torch import nn

import orca_hf
from orca_hf import OrcaConfig
from orca_hf.packed_linear import can_pack
from orca_hf.packed_weights import PackedWeights


def packed_forward(linear):
    packed = PackedWeights()
    packed.pack([linear], max_bytes=lambda: 10**9)
    (forward,) = packed.forwards
    assert forward.module is linear
    return packed, forward


DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True, params=["compiled", "oneDNN"])
def _products(request, monkeypatch):
    """Everything holds with and without a compiler."""
    if request.param == "oneDNN":
        monkeypatch.setattr("orca_kernels.compiled.library", lambda: None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 5, 3), (7, 16, 48), (64, 33, 97), (1, 1, 1)])
@torch.no_grad()
def test_a_packed_linear_computes_what_the_linear_computes(rows, inputs, outputs, bias, dtype):
    linear = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    _, forward = packed_forward(linear)
    hidden = torch.randn(1, rows, inputs, dtype=dtype)
    tolerance = max(1e-5, 2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(forward(hidden), linear(hidden), atol=tolerance, rtol=tolerance)


def at_offset(elements):
    """In a flat buffer, as libraries that shard weights lay them out."""

    def place(tensor):
        flat = torch.zeros(tensor.numel() + elements, dtype=tensor.dtype)
        flat[elements:] = tensor.flatten()
        return flat[elements:].view(tensor.shape)

    return place


def at_byte(offset):
    """Where a file that is mapped into memory happens to have it."""

    def place(tensor):
        data = tensor.contiguous().flatten().view(torch.uint8).tolist()
        buffer = bytearray([0] * offset + data)
        return torch.frombuffer(buffer, dtype=tensor.dtype, offset=offset).view(tensor.shape)

    return place


# How a tensor may lie in memory.
LAYOUTS = {
    "at an odd element": at_offset(1),
    "at an odd pair": at_offset(3),
    "at an even element": at_offset(2),
    "at an odd byte": at_byte(1),
    "at a byte between elements": at_byte(2),
    "at a word between pairs": at_byte(4),
    "an odd element of an odd storage": lambda tensor: at_byte(2)(at_offset(0)(tensor)),
    "transposed": lambda tensor: tensor.t().contiguous().t(),
    "every other element": lambda tensor: tensor.repeat_interleave(2, -1)[..., ::2],
    "one number for all": lambda tensor: tensor[..., :1].clone().expand(tensor.shape),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("outputs", "inputs"), [(4, 8), (1, 6), (5, 7), (3, 1)])
@torch.no_grad()
def test_a_weight_and_a_bias_may_lie_anywhere(layout, dtype, outputs, inputs):
    linear = nn.Linear(inputs, outputs, dtype=dtype)
    linear.weight, linear.bias = (nn.Parameter(LAYOUTS[layout](each.detach())) for each in (linear.weight, linear.bias))
    packed = PackedWeights()
    packed.pack([linear], max_bytes=lambda: 10**9)
    packed.refresh(deep=True)
    forward = packed.forwards[0] if packed.forwards else linear
    hidden = torch.randn(1, 3, inputs, dtype=dtype)
    tolerance = max(1e-5, 2 * torch.finfo(dtype).eps)
    for rows in (hidden, LAYOUTS[layout](hidden[0]), hidden[:, :0]):
        torch.testing.assert_close(forward(rows), linear(rows), atol=tolerance, rtol=tolerance)


CONTIGUOUS = [layout for layout in LAYOUTS if layout.startswith(("at", "an"))]


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [*((each, torch.float32) for each in LAYOUTS), *((each, torch.bfloat16) for each in CONTIGUOUS)],
    ids=str,
)
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_a_model_may_lie_anywhere(layout, dtype, model_type):
    batch, options = pad_left(PROMPTS), {"max_new_tokens": 24, "do_sample": False}
    plain, model = (make_model(model_type).to(dtype) for _ in range(2))
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and (parameter.dim() > 1 or layout != "transposed"):
                    setattr(module, name, nn.Parameter(LAYOUTS[layout](parameter.detach())))
    plain.load_state_dict(model.state_dict())
    if dtype is torch.bfloat16:  # natively it is rounded in another order
        plain = orca_hf.wrap(plain, OrcaConfig(max_slots=512))
    ours = orca_hf.wrap(model, OrcaConfig(max_slots=512)).generate(**batch, **options)
    assert torch.equal(ours, plain.generate(**batch, **options))


def test_under_grad_or_autocast_the_linears_own_product_runs():
    linear = nn.Linear(8, 8)
    _, forward = packed_forward(linear)
    hidden = torch.randn(1, 2, 8, requires_grad=True)
    forward(hidden).sum().backward()
    assert linear.weight.grad is not None
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert forward(hidden).dtype == torch.bfloat16


class Subclass(nn.Linear):
    pass


def with_forward(linear):
    linear.forward = lambda hidden: hidden
    return linear


def inference_linear():
    with torch.inference_mode():
        return nn.Linear(4, 4)


REFUSED = {
    "another class": lambda: Subclass(4, 4),
    "a forward of the user's": lambda: with_forward(nn.Linear(4, 4)),
    "float16": lambda: nn.Linear(4, 4, dtype=torch.float16),
    "another device": lambda: nn.Linear(4, 4, device="meta"),
    "made in inference mode": inference_linear,
    "not a linear": lambda: nn.Embedding(4, 4),
    "parametrised": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_packed_is_left_alone(name):
    assert not can_pack(REFUSED[name]())


def flip_lowest_bit(weight):
    weight.view(torch.int32 if weight.dtype is torch.float32 else torch.int16)[3, 5] ^= 1


def exchange(weight):
    weight.copy_(weight[:, torch.tensor([0, 1, 9, 3, 4, 5, 6, 7, 8, 2])].clone())


CHANGES = {
    "one bit": flip_lowest_bit,
    "two columns": exchange,
    "two rows": lambda weight: weight[:2].copy_(weight[:2].flip(0).clone()),
    "signs of every other column": lambda weight: weight[:, 1::2].neg_(),
    "columns of the later rows": lambda weight: weight[8:].copy_(weight[8:].roll(2, 1).clone()),
    "all": lambda weight: weight.mul_(2),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_a_deep_look_sees_what_data_hides(name, dtype):
    """Writes through .data move no version counter."""
    linear = nn.Linear(10, 12, bias=False, dtype=dtype)
    packed, forward = packed_forward(linear)
    CHANGES[name](linear.weight.data)
    packed.refresh(deep=False)
    assert packed.forwards[0] is forward
    packed.refresh(deep=True)
    assert packed.forwards[0] is not forward
    hidden = torch.randn(1, 3, 10, dtype=dtype)
    torch.testing.assert_close(packed.forwards[0](hidden), linear(hidden))
    packed.refresh(deep=True)
    assert packed.forwards[0] is not forward


def test_a_linear_that_can_no_longer_be_packed_is_dropped():
    linear = nn.Linear(4, 4)
    packed, _ = packed_forward(linear)
    with_forward(linear)
    packed.refresh(deep=False)
    assert packed.forwards == []


def test_copies_beyond_the_limit_are_not_made():
    packed = PackedWeights()
    packed.pack([nn.Linear(8, 8), nn.Linear(8, 8)], max_bytes=lambda: 300)
    assert packed.forwards == []
    assert packed.num_bytes == 0
    packed.pack([nn.Linear(8, 8)], max_bytes=lambda: 300)
    assert packed.num_bytes == 256


def test_short_work_runs_on_the_models_own_linears():
    """Comparing the packed copies with the weights costs more than a token or two can bring."""
    model = orca_hf.wrap(make_model(), OrcaConfig(max_slots=512))
    batch = pad_left(PROMPTS)
    model.generate(**batch, max_new_tokens=2, do_sample=False)
    runner = model.generate.engines[0].runner
    assert runner.packed.forwards == []
    model.generate(**batch, max_new_tokens=20, do_sample=False)
    assert sum(len(forward.linears) for forward in runner.packed.forwards) == 2 * 7 + 1
    with torch.no_grad():
        model.lm_head.weight.data.neg_()
    plain = make_model()
    with torch.no_grad():
        plain.lm_head.weight.data.neg_()
    for length in (1, 2, 30):
        options = {"max_new_tokens": length, "do_sample": False}
        assert torch.equal(model.generate(**batch, **options), plain.generate(**batch, **options))


def test_settings_can_do_without_packing():
    model = orca_hf.wrap(make_model(), OrcaConfig(max_slots=512, pack_weights=False))
    model.generate(**pad_left(PROMPTS), max_new_tokens=20, do_sample=False)
    assert model.generate.engines[0].stats.packed_bytes == 0

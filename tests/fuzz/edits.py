"""What users do to a model between its calls. Every edit is made on both twins, from equal random numbers."""

import copy
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# What was done, and how to take it back, if that is part of what users do.
Done = tuple[str, Callable[[], object] | None]
Edit = Callable[[PreTrainedModel, Random], Done]


class NothingToEditError(Exception):
    """The model has nothing of the kind."""


def _choose(draw: Random, found: Iterable[Any]) -> Any:
    listed = list(found)
    if not listed:
        raise NothingToEditError
    return draw.choice(listed)


def _noise(draw: Random, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    return torch.randn(like.shape, generator=generator, dtype=torch.float32).to(like.dtype) * 0.2


def _modules(model: PreTrainedModel, wanted: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in model.named_modules() if name and wanted(module))


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _is_mlp(module: nn.Module) -> bool:
    return type(module).__name__.lower().endswith("mlp")


def _is_small(module: nn.Module) -> bool:
    """Takes hidden states and returns them: neither a model, nor a layer with a cache, nor an embedding."""
    return _is_linear(module) or _is_norm(module) or _is_mlp(module)


def _set(model: PreTrainedModel, name: str, value: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, value)


def step(model: PreTrainedModel, draw: Random) -> Done:
    """As an optimizer does it: in place, under no_grad."""
    name, parameter = _choose(draw, model.named_parameters())
    with torch.no_grad():
        parameter.add_(_noise(draw, parameter))
    return f"{name}.add_(noise)", None


def write_data(model: PreTrainedModel, draw: Random) -> Done:
    """Writes that move no version counter."""
    name, parameter = _choose(draw, model.named_parameters())
    how = draw.choice(["neg_()", "[0] = 1", "[-1] *= 2", "= clone * 2", "= transposed storage"])
    if how == "neg_()":
        parameter.data.neg_()
    elif how == "[0] = 1":
        parameter.data[0] = 1
    elif how == "[-1] *= 2":
        parameter.data[-1] *= 2
    elif how == "= clone * 2":
        parameter.data = parameter.data.clone() * 2
    else:
        parameter.data = parameter.data.t().clone().t() if parameter.dim() == 2 else parameter.data.clone()
    return f"{name}.data {how}", None


def write_numpy(model: PreTrainedModel, draw: Random) -> Done:
    """Writes that PyTorch does not see at all."""
    wide = (torch.float32, torch.float64)
    name, parameter = _choose(draw, (item for item in model.named_parameters() if item[1].dtype in wide))
    parameter.detach().numpy()[...] *= -1
    return f"{name}.numpy() *= -1", None


def write_buffer(model: PreTrainedModel, draw: Random) -> Done:
    """Rotary frequencies, for instance."""
    name, buffer = _choose(draw, (item for item in model.named_buffers() if item[1].is_floating_point()))
    buffer.mul_(0.9)
    return f"{name}.mul_(0.9)", None


def load_state(model: PreTrainedModel, draw: Random) -> Done:
    """Another checkpoint, copied or put in place of the parameters."""
    assign = draw.random() < 0.5
    state = {name: value + _noise(draw, value) for name, value in model.state_dict().items() if value.dim() > 1}
    model.load_state_dict(state, strict=False, assign=assign)
    return f"load_state_dict(noisy, assign={assign})", None


def tie(model: PreTrainedModel, draw: Random) -> Done:
    """The head gets the embedding's weight, or one of its own."""
    head = model.get_output_embeddings()
    if "weight" not in head._parameters:  # an adapter's
        raise NothingToEditError
    if draw.random() < 0.5:
        head.weight = model.get_input_embeddings().weight
        return "the head is tied to the embedding", None
    head.weight = nn.Parameter(head.weight.detach().clone() * 0.5)
    return "the head has a weight of its own", None


def new_parameter(model: PreTrainedModel, draw: Random) -> Done:
    """A weight is replaced, of the same values or others."""
    name, module = _choose(draw, _modules(model, _is_small))
    kind, parameter = _choose(draw, (item for item in module._parameters.items() if item[1] is not None))
    odd = draw.random() < 0.3  # not where its storage begins
    values = parameter.detach() + _noise(draw, parameter)
    if odd:
        values = torch.cat([values.new_zeros(1), values.flatten()])[1:].view(values.shape)
    setattr(module, kind, nn.Parameter(values))
    return f"{name}.{kind} is replaced{', at an odd offset' if odd else ''}", None


def bias(model: PreTrainedModel, draw: Random) -> Done:
    """A linear's bias comes, changes, or goes."""
    name, linear = _choose(draw, _modules(model, _is_linear))
    if linear.bias is None:
        linear.bias = nn.Parameter(_noise(draw, linear.weight[:, 0]))
        return f"{name}.bias comes", None
    if draw.random() < 0.4:
        linear.bias = None
        return f"{name}.bias = None", None
    linear.bias.data.fill_(0.7)
    return f"{name}.bias.data.fill_(0.7)", None


def number(model: PreTrainedModel, draw: Random) -> Done:
    """A number that a module computes with: a norm's epsilon, attention's scale."""
    # Rates of dropout, and numbers that no forward reads, change nothing, natively and by Orca.
    found = [
        (f"{name}.{attribute}", module, attribute)
        for name, module in model.named_modules()
        for attribute, value in module.__dict__.items()
        if type(value) is float and value not in (0.0,) and "dropout" not in attribute
    ]
    said, module, attribute = _choose(draw, found)
    factor = draw.choice([0.5, 1.3]) if "eps" not in attribute else 0
    setattr(module, attribute, getattr(module, attribute) * factor + (0.5 if factor == 0 else 0))
    return f"{said} = {getattr(module, attribute)}", None


def config_number(model: PreTrainedModel, draw: Random) -> Done:
    """A setting that forwards read each time they run."""
    config = model.config.get_text_config()
    names = ["sliding_window", "final_logit_softcapping", "attn_logit_softcapping", "logits_scaling", "layer_types"]
    name = _choose(draw, (name for name in names if getattr(config, name, None) is not None))
    if name == "layer_types":
        kind = draw.choice(["full_attention", "sliding_attention"])
        if kind == "sliding_attention" and getattr(config, "sliding_window", None) is None:
            kind = "full_attention"
        config.layer_types = [kind] * len(config.layer_types)
    else:
        value = getattr(config, name)
        setattr(config, name, max(2, value // 2) if isinstance(value, int) else value * 0.7)
    return f"config.{name} = {getattr(config, name)}", None


def attention(model: PreTrainedModel, draw: Random) -> Done:
    """Another implementation of attention."""
    if not (model._supports_attention_backend and model._supports_sdpa):
        raise NothingToEditError
    name = draw.choice(["eager", "sdpa"])
    model.set_attn_implementation(name)
    return f"set_attn_implementation({name!r})", None


def swap(model: PreTrainedModel, draw: Random) -> Done:
    """A module is exchanged for a copy with other weights."""
    name, module = _choose(draw, _modules(model, _is_small))
    other = copy.deepcopy(module)
    for parameter in other.parameters():
        parameter.data.mul_(0.8)
    _set(model, name, other)
    return f"{name} is exchanged", lambda: _set(model, name, module)


def layers(model: PreTrainedModel, draw: Random) -> Done:
    """Two layers change places."""
    found = _choose(draw, (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1))
    weights = [layer.state_dict() for layer in found[:2]]
    if weights[0].keys() != weights[1].keys():
        raise NothingToEditError
    first, second = ({name: value.clone() for name, value in each.items()} for each in weights)
    found[0].load_state_dict(second)
    found[1].load_state_dict(first)
    return "the first two layers exchange their weights", None


def hook(model: PreTrainedModel, draw: Random) -> Done:
    """A forward hook, or one before the forward."""
    name, module = _choose(draw, _modules(model, _is_small))
    if draw.random() < 0.5:
        handle = module.register_forward_hook(lambda module, inputs, output: output * 1.25)
        return f"a forward hook on {name}", handle.remove
    handle = module.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1.25, *inputs[1:]))
    return f"a forward pre-hook on {name}", handle.remove


def forward(model: PreTrainedModel, draw: Random) -> Done:
    """A forward of the module's own, in the instance."""
    name, module = _choose(draw, _modules(model, _is_small))
    own = module.forward
    module.forward = lambda *args, **kwargs: own(*args, **kwargs) * 0.75
    return f"{name}.forward is replaced", lambda: delattr(module, "forward")


def _one_token(output: Tensor) -> Tensor:
    return output if output.shape[1] > 1 else output * 0.5


def _last_position(output: Tensor) -> Tensor:
    output = output.clone()
    output[:, -1] *= 1.5
    return output


def _by_rows(output: Tensor) -> Tensor:
    return output / output.shape[0]


def _by_mean(output: Tensor) -> Tensor:
    return output + 0.1 * output.mean(dim=1, keepdim=True)


LOOKS = {"one token": _one_token, "the last position": _last_position, "rows": _by_rows, "the mean": _by_mean}


class OwnModule(nn.Module):
    """A user's module, which looks at the shape of the batch."""

    def __init__(self, inner: nn.Module, look: str) -> None:
        super().__init__()
        self.inner = inner
        self.look = look

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return LOOKS[self.look](self.inner(*args, **kwargs))


class OwnLinear(nn.Linear):
    """A user's linear, which is one, and a little more."""

    def forward(self, hidden: Tensor) -> Tensor:
        return _last_position(super().forward(hidden))


def own_module(model: PreTrainedModel, draw: Random) -> Done:
    """Code of the user's own in the model."""
    name, module = _choose(draw, _modules(model, _is_mlp))
    look = draw.choice(sorted(LOOKS))
    _set(model, name, OwnModule(module, look))
    return f"{name} is a module of the user's that looks at {look}", lambda: _set(model, name, module)


def own_class(model: PreTrainedModel, draw: Random) -> Done:
    """A linear becomes one of the user's class."""
    name, module = _choose(draw, _modules(model, lambda module: type(module) is nn.Linear))
    module.__class__ = OwnLinear
    return f"{name} is of a class of the user's", lambda: setattr(module, "__class__", nn.Linear)


def mode(model: PreTrainedModel, draw: Random) -> Done:
    """Training mode, in which some models drop values at random."""
    model.train()
    return "train()", lambda: model.eval()


def gradients(model: PreTrainedModel, draw: Random) -> Done:
    """Frozen, or not."""
    wanted = draw.random() < 0.5
    model.requires_grad_(wanted)
    return f"requires_grad_({wanted})", None


def defaults(model: PreTrainedModel, draw: Random) -> Done:
    """The model's own generation_config."""
    name, value = draw.choice([("eos_token_id", [33, 40, 41]), ("repetition_penalty", 1.2), ("eos_token_id", None)])
    setattr(model.generation_config, name, value)
    return f"generation_config.{name} = {value}", None


def adapter(model: PreTrainedModel, draw: Random) -> Done:
    """A LoRA adapter of PEFT, put into the model, and taken out again."""
    from peft import LoraConfig, get_peft_model  # takes seconds, and few cases want it

    linears = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if type(m) is nn.Linear} - {"lm_head"})
    if not linears or any("lora" in name for name, _ in model.named_parameters()):
        raise NothingToEditError
    names = draw.sample(linears, min(2, len(linears)))
    torch.manual_seed(draw.randrange(2**31))  # its weights come from the default generator
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=names, init_lora_weights=False))
    return f"a LoRA adapter on {', '.join(names)}", lambda: adapted.unload()


EDITS: tuple[Edit, ...] = (
    adapter, attention, bias, config_number, defaults, forward, gradients, hook, layers, load_state, mode,
    new_parameter, number, own_class, own_module, step, swap, tie, write_buffer, write_data, write_numpy,
)  # fmt: skip

"""The trial: a model's first iterations, small ones, held against its native forward before Orca is trusted with it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from orca_hf.batch_invariance import ROWS
from orca_hf.errors import UnsupportedError
from orca_hf.kv_pool import KVPool
from orca_hf.parity import disagreement
from orca_hf.random_state import kept
from orca_hf.request import Request
from orca_hf.runner import CACHE_FIELD, ModelRunner, dummy_layers
from orca_hf.scheduler import Iteration, Step


def try_out(runner: ModelRunner) -> None:
    """Run two requests through a prefill and a decode iteration, and compare with the native forward of each.

    It leaves in `runner` a pool with the shape of each layer's K/V, and what it has found out about the model, and the
    default random generator as it was: a model in training mode may draw from it.

    Raises:
        UnsupportedError: The model cannot be run by Orca: its logits would not be those of its native forward.
    """
    _check_signature(runner)
    with kept(runner.input_device):
        _compare(runner)


def _compare(runner: ModelRunner) -> None:
    requests = _make_requests(runner)
    prefill = Iteration(tuple(Step(r, 0, len(r.prompt) - 1, samples=False) for r in requests))
    context = runner.forward(prefill, [])[1]
    context.check_windows(runner.model.config.get_text_config(decoder=True))
    runner.calls, runner.windows = context.calls, context.windows
    if runner.config.deterministic:
        runner.run(prefill)  # again, for K/V made as all that follow
    ours = runner.run(Iteration(tuple(Step(r, len(r.prompt) - 1, 1, samples=True) for r in requests)))
    for request, logits in zip(requests, ours, strict=True):
        with torch.inference_mode(False), torch.no_grad(), runner.autocast_mode(runner.input_device.type):
            output = _native_output(runner, request.prompt)
        # Under autocast the model's last step may be in fp32 again.
        autocast = None if runner.autocast is None else runner.autocast[1]
        if wrong := disagreement(logits, output.logits[0, -1], autocast):
            raise UnsupportedError(f"in a trial iteration its logits differ from the native forward {wrong}")
        if runner.config.deterministic:
            alone = runner.run(Iteration((Step(request, 0, len(request.prompt), samples=True),)))[0]
            if not torch.equal(alone, logits):
                raise UnsupportedError("its logits depend on who shares an iteration, whatever deterministic says")
        request.computed = len(request.prompt)
        states = runner.read_kv([request], request.computed)
        runner.has_native_cache = _is_cached(states, getattr(output, CACHE_FIELD, None))


def _check_signature(runner: ModelRunner) -> None:
    needed = ["input_ids"]
    if not runner.adapted or any(forward.adapter.takes_positions for forward in runner.adapted):
        needed.append("position_ids")
    if missing := [name for name in needed if name not in runner.accepts]:
        raise UnsupportedError(f"its forward takes no {' and no '.join(missing)}")
    config = runner.model.config.get_text_config(decoder=True)
    if getattr(config, "attn_temperature_tuning", False):
        # It is 1 up to there, and counts an iteration's tokens as if they were one row's.
        most = config.floor_scale - 1
        if runner.config.max_batch_tokens is None or runner.config.max_batch_tokens > most:
            raise UnsupportedError(f"its attention temperature wants iterations of {most} tokens at most")


def _make_requests(runner: ModelRunner) -> list[Request]:
    """Two requests that hold their slots, in a pool of just their size."""
    # More than one piece of rows together, where it matters whether products are made of pieces.
    lengths = (ROWS + 7, 4) if runner.config.deterministic else (7, 4)
    vocab_size, block_size = runner.vocab_size, runner.config.block_size
    requests = [Request([(31 * i + 7 * length) % vocab_size for i in range(length)], 1) for length in lengths]
    blocks = -(-max(lengths) // block_size)
    runner.pool = KVPool(len(requests) * blocks * block_size)
    for index, request in enumerate(requests):
        request.blocks = tuple(range(index * blocks, (index + 1) * blocks))
    return requests


def _native_output(runner: ModelRunner, prompt: Sequence[int]) -> Any:
    """What the model's own forward makes of `prompt`, called as generate() calls it."""
    input_ids = torch.tensor([prompt], dtype=torch.int64, device=runner.input_device)
    arguments: dict[str, Any] = {"input_ids": input_ids, "use_cache": True}
    if "position_ids" in runner.accepts:
        prepare: Callable[..., Tensor] = runner.model._prepare_position_ids_for_generation  # type: ignore[assignment]
        arguments["position_ids"] = prepare(input_ids, {})
    return runner.model(**arguments)


def _is_cached(states: list[tuple[Tensor, Tensor]], cache: Any) -> bool:
    """Whether the layers of a native `cache` hold `states`, of which one with a window holds the last alone."""
    layers = getattr(cache, "layers", ())
    if len(layers) != len(states):
        return False
    dummies = dummy_layers(cache)
    for index, (layer, state) in enumerate(zip(layers, states, strict=True)):
        if index in dummies:
            continue
        for ours, native in zip(state, (getattr(layer, "keys", None), getattr(layer, "values", None)), strict=True):
            if native is None or native.dim() != 4 or native.dtype != ours.dtype:
                return False
            if (kept := native.shape[2]) > ours.shape[2]:
                return False
            ours = ours[:, :, ours.shape[2] - kept :].to(native.device)
            tolerance = max(1e-4, 16 * torch.finfo(native.dtype).eps)
            if ours.shape != native.shape or not torch.allclose(ours, native, rtol=tolerance, atol=tolerance):
                return False
    return True

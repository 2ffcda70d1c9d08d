"""Hooks: our own, which records the inputs of layers for the thread that asks for them; and the structure of a model,
which changes with modules and hooks.

B batch, N tokens of a forward, D hidden size.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules import module as every_module

_installing = threading.Lock()
_thread = threading.local()  # .inputs: the dictionary of `recorded_inputs` in this thread


def record_input(layer: nn.Module, inputs: tuple) -> None:
    """Our forward pre-hook of a layer. It stays on the layer and does nothing in other threads: hooks that came and
    went with each call would change a dictionary that the forwards of other threads walk."""
    recorded = getattr(_thread, "inputs", None)
    if recorded is not None and layer in recorded:
        recorded[layer] = inputs[0]


@contextmanager
def recorded_inputs(layers: Sequence[nn.Module]) -> Iterator[dict[nn.Module, Tensor]]:
    """A dictionary that gets the hidden states [B, N, D] that enter each of the layers in forwards of this thread."""
    with _installing:
        for layer in layers:
            if record_input not in layer._forward_pre_hooks.values():
                layer.register_forward_pre_hook(record_input)
    _thread.inputs = recorded = dict.fromkeys(layers)
    try:
        yield recorded
    finally:
        _thread.inputs = None


def hooks_of(module: nn.Module) -> list[int]:
    """The numbers of a module's forward hooks, except our own; no two hooks of a process have the same number."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    if not (before or after):
        return []
    return [*(number for number, hook in list(before.items()) if hook is not record_input), *after]


def is_hooked(model: nn.Module) -> bool:
    """Whether others than we have hooks in a model, those of accelerate and those of all modules included."""
    return bool(every_module._global_forward_pre_hooks or every_module._global_forward_hooks) or any(
        hooks_of(module) or hasattr(module, "_hf_hook") for module in model.modules())


def structure_of(model: nn.Module) -> list[object]:
    """What decides beside weights and config what a model computes, to be compared with what it was before: its
    modules, with their forwards, hooks and constants, such as scales. The first one is the model.

    Linear layers count with forwards and hooks alone. They may be replaced, by packed ones for instance, because all
    decoders look them up in each forward.
    """
    structure: list[object] = []
    for module in model.modules():
        own = vars(module)
        if not isinstance(module, nn.Linear):
            structure += module, type(module).forward
            structure += (value for value in list(own.values()) if type(value) is float)
        structure += hooks_of(module)
        structure += (id(own[name]) for name in ("forward", "_hf_hook") if name in own)
    return [*structure, *every_module._global_forward_pre_hooks, *every_module._global_forward_hooks]

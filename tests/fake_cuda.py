"""A CUDA device without data or hardware: `FakeTensorMode`, and a mode that forbids what a CUDA graph cannot replay.

And a graph without CUDA, which repeats operations on the same addresses.
"""

import contextlib

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda")


class Indexing(TorchFunctionMode):
    """Indexing and `copy_` by operations: a build of torch without CUDA refuses the methods of tensors on CUDA."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__:
            view, tensors = self.view(*args)
            return torch.ops.aten.index.Tensor(view, tensors) if tensors else view
        if function is torch.Tensor.__setitem__:
            (view, tensors), value = self.view(*args[:2]), args[2]
            if tensors:
                value = value if isinstance(value, torch.Tensor) else view.new_full((), value)
                torch.ops.aten.index_put_(view, tensors, value)
            elif isinstance(value, torch.Tensor):
                view.copy_(value)
            else:
                view.fill_(value)
            return None
        if function is torch.Tensor.copy_:
            return torch.ops.aten.copy_.default(*args[:2])
        if function is torch.Tensor.__invert__:
            return torch.ops.aten.bitwise_not.default(*args)
        return function(*args, **(kwargs or {}))

    @staticmethod
    def view(tensor, index):
        index = index if isinstance(index, tuple) else (index,)
        used = sum(part is not None and part is not Ellipsis for part in index)
        if Ellipsis in [part for part in index if not isinstance(part, torch.Tensor)]:
            at = next(place for place, part in enumerate(index) if part is Ellipsis)
            index = (*index[:at], *[slice(None)] * (tensor.dim() - used), *index[at + 1 :])
        tensors, dim = [], 0
        for part in index:
            if part is None:
                tensor = tensor.unsqueeze(dim)
            elif isinstance(part, slice):
                tensor = torch.ops.aten.slice.Tensor(tensor, dim, part.start, part.stop, part.step or 1)
            elif isinstance(part, int):
                tensor = tensor.select(dim, part)
                continue
            else:
                part = torch.tensor(part) if isinstance(part, list) else part
                tensors += [None] * (dim - len(tensors)) + [part]
            dim += 1
        return tensor, tensors


class Operations(TorchDispatchMode):
    """Records operations with their shapes, and raises for copies between devices."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, torch.Tensor)]
        name = str(function)
        moves = len({each.device for each in tensors if each.dim() or each.device.type == "cuda"}) > 1
        if "_to_copy" in name or "copy_" in name or "lift_fresh" in name:
            moves = len({each.device for each in tensors}) > 1 or "lift_fresh" in name
        assert not moves, f"{name} moves data between devices: {[(each.device, each.shape) for each in tensors]}"
        self.seen.append((name, [tuple(each.shape) for each in tensors]))
        return out


class Graph(TorchDispatchMode):
    """Records operations while they run; `replay` repeats them, with the same numbers, on the same tensors."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.steps.append((function, args, kwargs or {}, out))
        return out

    def replay(self):
        for function, args, kwargs, before in self.steps:
            now = function(*args, **kwargs)
            for old, new in zip(tree_leaves(before), tree_leaves(now), strict=True):
                if isinstance(old, torch.Tensor) and old.untyped_storage()._cdata != new.untyped_storage()._cdata:
                    old.copy_(new)


@contextlib.contextmanager
def fake_cuda():
    with FakeTensorMode(allow_non_fake_inputs=True), Indexing(), torch.inference_mode():
        yield


def move(module):
    """Replace parameters and buffers by ones on CUDA, without data."""
    for part in module.modules():
        for weights in (part._parameters, part._buffers):
            for name, weight in weights.items():
                if weight is not None:
                    weights[name] = torch.empty(weight.shape, dtype=weight.dtype, device=CUDA)

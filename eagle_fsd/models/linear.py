"""Packed linear layers: weights in the layout of CPU kernels, as bfloat16 or float16 blocks or int8.

M rows, K inputs of a layer, N outputs. Layers with the same input are stacked into one weight and computed together.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from tqdm import tqdm

from . import QUANTIZATIONS
from .hooks import is_hooked
from .kernels import ZERO, fastest_kernel
from .memory import MappedFiles, copy_from_files


class Packed:
    """A bfloat16 weight in the blocks of oneDNN's kernels, and its bias, for processors that multiply bfloat16.

    The stock layer converts its weight to that layout in every forward, which for a few rows takes as long as the
    product. Results are bit-identical.
    """

    NAME = "bfloat16"
    ROWS = 64  # the layout is optimised for this many rows, and is as good for one

    def __init__(
        self,
        weight: Tensor,  # [N, K]
        bias: Tensor | None,  # [N]
        dtype: torch.dtype | None = None,  # of the layer's inputs and outputs; None: the weight's
    ) -> None:
        dtype = dtype or weight.dtype
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, self.ROWS)
        self.bias, self.dtype, self.outputs = bias, dtype, len(weight)

    def __call__(self, rows: Tensor) -> Tensor:  # [..., K] -> [..., N], bfloat16
        return torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")

    def dense(self) -> Tensor:  # [N, K]
        """The weight as it was."""
        return self.weight.to_dense()


class Half:
    """A weight in the float16 blocks of FBGEMM's kernels, and its bias, for processors that do not multiply bfloat16.

    Those kernels (AVX2 with F16C, or AVX-512) read half the bytes of float32 and compute in float32, for a few rows two
    to four times as fast as torch in float32 or bfloat16. float16 represents weights stored in bfloat16 or float16
    exactly, except tiny ones (`fits_half`), so that results equal those of float32.
    """

    NAME = "float16"

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> None:
        self.bias, self.dtype, self.outputs = bias, dtype or weight.dtype, len(weight)
        self.weight = torch.ops.quantized.linear_prepack_fp16(weight.float(), None if bias is None else bias.float())

    def __call__(self, rows: Tensor) -> Tensor:  # [..., K] -> [..., N], float32
        out = torch.ops.quantized.linear_dynamic_fp16(rows.float().reshape(-1, rows.shape[-1]), self.weight)
        return out.view(*rows.shape[:-1], -1)

    def dense(self) -> Tensor:  # [N, K]
        """The weight, rounded to float16."""
        return torch.ops.quantized.linear_unpack_fp16(self.weight)[0].to(self.dtype)


class Int8:
    """A weight in int8 with a scale per output; rows are rounded to int8 with a scale per row.

    Few large numbers of a row, or of a weight, would take most of int8's range. So both are first multiplied by an
    orthogonal matrix, block by block, which spreads such numbers and changes no product (QuaRot, arXiv 2404.00456,
    section 4.1): x . w = (x H) . (w H) / S for a Hadamard matrix H of S rows, whose entries are 1 and -1.

    A row's result is independent of other rows, because the products are sums of integers; `block_size` leaves only
    rotations for which this holds, too. Both roundings are symmetric. (LLM.int8, arXiv 2208.07339, section 2:
    vector-wise.) The product is that of the kernel which is the faster one here; either gives the same bits.
    """

    NAME = "int8, rotated"  # in the keys of what is stored about a model: another form needs another name
    BLOCK = 32  # S, where it divides K: larger blocks lower the error further, but take longer
    LARGEST = 127
    PART = 256  # rows of a weight that are rounded together, in the processor's cache

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> None:
        self.rotation = hadamard(block_size(weight.shape[1], self.BLOCK))  # [S, S]
        self.scales = torch.empty(len(weight))  # [N]
        numbers = torch.empty(weight.shape, dtype=torch.int8)
        for part, scales, rounded in zip(*(tensor.split(self.PART) for tensor in (weight, self.scales, numbers)),
                                         strict=True):
            exact = rotated(part.to(torch.float32, copy=True), self.rotation)
            scales.copy_(exact.abs().amax(1)).clamp_min_(1e-10).div_(self.LARGEST)
            rounded.copy_(exact.div_(scales[:, None]).round_())
        self.scales /= len(self.rotation)
        self.product = fastest_kernel(*weight.shape)(numbers, self.scales)
        self.bias = None if bias is None else bias.float()
        self.dtype, self.outputs = dtype or weight.dtype, len(weight)
        self.least = torch.full((1, 1), 1e-10)

    def __call__(self, rows: Tensor) -> Tensor:  # [..., K] -> [..., N], float32
        flat = rotated(rows.float().reshape(-1, rows.shape[-1]), self.rotation)
        scale = torch.add(self.least, flat.abs().amax(-1, keepdim=True), alpha=1 / self.LARGEST)  # [M, 1]
        out = self.product((flat / scale).add_(ZERO + 0.5))
        out = out.mul_(scale) if self.bias is None else torch.addcmul(self.bias, out, scale)
        return out.view(*rows.shape[:-1], -1)

    def dense(self) -> Tensor:  # [N, K]
        """The rounded weight, in the basis of the model's own."""
        return rotated(self.product.numbers() * self.scales[:, None], self.rotation).to(self.dtype)


def rotated(rows: Tensor, rotation: Tensor) -> Tensor:  # [M, K] float32, [S, S] -> [M, K]
    """Each S numbers of the rows, times a symmetric matrix."""
    return rows if len(rotation) == 1 else rows.reshape(-1, len(rotation)).mm(rotation).view_as(rows)


@functools.cache
def hadamard(size: int) -> Tensor:
    """Sylvester's Hadamard matrix [S, S] for a power of two: symmetric, and its square is S times the identity."""
    return torch.ones(1, 1) if size == 1 else torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), hadamard(size // 2))


@functools.cache
def block_size(inputs: int, largest: int) -> int:
    """The largest power of two up to `largest` that divides the inputs, and for which the kernels that this machine
    chooses for 1 to 64 rows, and for some more, rotate a row alike to the last bit; 1: no rotation."""
    size = largest
    while inputs % size:
        size //= 2
    rows = torch.randn(257, inputs, generator=torch.Generator().manual_seed(0))
    whole = rotated(rows, hadamard(size))
    alike = all(torch.equal(rotated(rows[:count], hadamard(size)), whole[:count]) for count in [*range(1, 65), 128])
    return size if alike else block_size(inputs, size // 2)


class Int8Fast(Int8):
    """`Int8` whose decoder uses the fastest attention, not `fused.InvariantAttention`."""

    NAME = "int8, rotated, fast"


Form = Packed | Half | Int8
CLASSES = dict(zip(QUANTIZATIONS, (Int8, Int8Fast), strict=True))
WORKERS = 4  # packing threads; each copies a layer in float32


def choose_form(
    weight: Tensor,  # [N, K], on a CPU
    quantization: str | None,
    dtype: torch.dtype | None = None,
) -> type[Form] | None:
    """The fastest form on this processor for a weight in `dtype` (default its own); None: not packed."""
    if quantization is not None:
        return CLASSES[quantization] if weight.is_floating_point() else None
    if (dtype or weight.dtype) == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return Packed
    return Half if has_half_kernels() and fits_half(weight) else None


@functools.cache
def has_half_kernels() -> bool:
    """Whether torch has FBGEMM's kernels for this processor: x86 with AVX2."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    try:
        rows = torch.ops.quantized.linear_dynamic_fp16(torch.ones(1, 8), Half(torch.ones(8, 8), None).weight)
    except RuntimeError:  # torch has no such kernels
        return False
    return torch.equal(rows, torch.full((1, 8), 8.0))


TINY, LARGEST_HALF = 2.0**-25, 65504  # float16: half its smallest step, its largest number


def fits_half(weight: Tensor) -> bool:
    """Whether float16 represents the weight: bfloat16 numbers from 2 ** -17 to 65280 exactly, smaller ones nearly."""
    if weight.dtype == torch.float16:
        return True
    if weight.dtype == torch.bfloat16:
        least, largest = weight.aminmax()
        return bool(-least <= LARGEST_HALF and largest <= LARGEST_HALF)
    parts = weight.detach().flatten().split(1 << 18)  # fits the processor's cache
    return all(((part.half().float() - part.float()).abs() <= TINY).all() for part in parts)


class PackedLinear(nn.Linear):
    """Replaces a linear layer of a stock model, with the same results. If several layers are packed together, each
    computes them all and returns its own part; the fused decoder calls them as one (`Joined`).

    The weight is no parameter: `weight` and `state_dict` unpack it. A copy or a pickle is a stock layer.

    Args:
        layer: the layer to replace.
        packed: the weight of this layer, or of several, among which its outputs are `rows`.
    """

    def __init__(self, layer: nn.Linear, packed: Form, rows: slice) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.packed, self.rows, self.dtype = packed, rows, packed.dtype
        self.has_bias = layer.bias is not None
        self.training = False

    @property
    def weight(self) -> Tensor:  # [N, K]
        return self.packed.dense()[self.rows]

    @property
    def bias(self) -> Tensor | None:  # [N]
        return None if not self.has_bias else self.packed.bias[self.rows].to(self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() and input.requires_grad or not input.numel():
            return nn.functional.linear(input, self.weight, self.bias)
        return self.packed(input)[..., self.rows].to(input.dtype)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        self.stock()._save_to_state_dict(destination, prefix, keep_vars)

    def _apply(self, fn, recurse: bool = True) -> PackedLinear:
        moved = fn(torch.empty(0, dtype=self.dtype))
        if (moved.dtype, moved.device.type) != (self.dtype, "cpu"):
            raise ValueError(f"packed weights cannot leave the CPU or {self.dtype}: load the model with prepack=False "
                             f"to use {moved.dtype} on {moved.device}")
        return self

    def stock(self, memo: dict | None = None) -> nn.Linear:
        """A stock layer with the same weight."""
        return linear_of(self.weight.clone(), None if self.bias is None else self.bias.clone())

    __deepcopy__ = stock

    def __reduce__(self) -> tuple:
        return copy.copy, (self.stock(),)  # unpickled, it is the stock layer


def linear_of(
    weight: Tensor,  # [N, K]
    bias: Tensor | None,  # [N]
) -> nn.Linear:
    """A stock layer with these weights, which are not trained."""
    layer = nn.Linear(weight.shape[1], len(weight), bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer.eval()


class Joined:
    """Linear layers with the same input, computed as one: [..., K] -> [..., N], their outputs concatenated.

    `pack` and `stack` decide how. Every call looks the layers up, and if others have taken their places, it is decided
    anew.

    Args:
        places: (parent module, name) of each layer.
    """

    def __init__(self, *places: tuple[nn.Module, str]) -> None:
        self.places = places
        self.outputs = sum(layer.out_features for layer in self.layers)
        # The layers, and what computes all of them; None: each itself. Threads share it: it is replaced as a whole.
        self.decided: tuple[list[nn.Module], Form | Stacked | None] = [], None

    @property
    def layers(self) -> list[nn.Module]:
        return [module._modules[name] for module, name in self.places]

    @property
    def form(self) -> type[Form] | None:
        """The form in which the first layer is packed; None: it is plain."""
        layer = self.layers[0]
        return type(layer.packed) if type(layer) is PackedLinear else None

    def __call__(self, rows: Tensor) -> Tensor:
        layers = self.layers
        decided_for, whole = self.decided
        if layers != decided_for or type(whole) is Stacked and whole.places != _places(layers):
            whole = self._packed(layers)
            self.decided = layers, whole
        if whole is not None:
            return whole(rows)
        outputs = [layer(rows) for layer in layers]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def _packed(self, layers: Sequence[nn.Module]) -> Form | None:
        """The packed weight of which these layers are the whole; None: there is none."""
        whole = {layer.packed if type(layer) is PackedLinear else None for layer in layers}
        form = whole.pop()
        return form if not whole and form is not None and form.outputs == self.outputs else None

    def __getstate__(self) -> dict:
        return vars(self) | {"decided": ([], None)}  # a copy has layers of its own, which are not packed

    @torch.no_grad()
    def pack(self, quantization: str | None, dtype: torch.dtype | None = None) -> None:
        """Replace the layers by packed ones where they are plain: by parts of one weight if all have the same form
        (`choose_form`), else each alone. On an accelerator `stack` them.

        Args:
            dtype: input and output dtype of the packed layers; None: the dtype of their weights.
        """
        layers = self.layers
        if all(_is_stock(layer) and layer.weight.device.type != "cpu" for layer in layers):
            self.stack()
            return
        forms = {choose_form(layer.weight, quantization, dtype) if _is_plain(layer) else None for layer in layers}
        form = forms.pop()
        if forms:
            for place in self.places:
                Joined(place).pack(quantization, dtype)
            return
        if form is None:
            return
        biases = [layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
        bias = None if all(layer.bias is None for layer in layers) else torch.cat(biases).detach()
        weight = layers[0].weight if len(layers) == 1 else torch.cat([layer.weight for layer in layers])
        packed, start = form(weight.detach(), bias, dtype), 0
        for (module, name), layer in zip(self.places, layers, strict=True):
            setattr(module, name, PackedLinear(layer, packed, slice(start, start + layer.out_features)))
            start += layer.out_features

    @torch.no_grad()
    def stack(self) -> None:
        """Compute the layers as one kernel, see `Stacked`, if their weights have the same dtype and device. The largest
        group of layers exists twice for a moment."""
        layers = self.layers
        kinds = {(layer.weight.dtype, layer.weight.device, layer.bias is None) for layer in layers}
        if len(layers) > 1 and len(kinds) == 1:
            self.decided = layers, Stacked(layers)


class Stacked:
    """The weights of stock layers as parts of one weight, and their biases: their parameters are views of it from now
    on, so that memory has them once. The layers compute as before."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.weight = _stacked([layer.weight for layer in layers])  # [N, K]
        self.bias = None if layers[0].bias is None else _stacked([layer.bias for layer in layers])  # [N]
        self.places = _places(layers)  # others: the weights were replaced, converted or moved

    def __call__(self, rows: Tensor) -> Tensor:
        return nn.functional.linear(rows, self.weight, self.bias)


def _places(layers: Sequence[nn.Linear]) -> list[int]:
    """Addresses of weights and biases."""
    return [tensor.data_ptr() for layer in layers for tensor in (layer.weight, layer.bias) if tensor is not None]


def _stacked(parts: Sequence[nn.Parameter]) -> Tensor:
    """One tensor of which the parts are views from now on, if they are not already."""
    first, end = parts[0].detach(), parts[0].data_ptr()
    for part in parts:
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or part.data_ptr() != end:
            whole = torch.cat([part.detach() for part in parts])
            for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
                part.data = view
            return whole
        end += part.nbytes
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


@torch.no_grad()
def pack(
    module: nn.Module, quantization: str | None, dtype: torch.dtype | None = None, groups: Sequence[Joined] = ()
) -> None:
    """Pack the plain linear layers of a module for which `choose_form` has a form, and copy its other weights out of
    mapped files, which are not needed afterwards.

    Args:
        dtype: of all floating parameters, and of inputs and outputs of packed layers; None: their own.
        groups: layers to be computed as one; all others are packed alone.
    """
    files = MappedFiles()
    for weight in module.parameters() if dtype is not None else ():
        files.release(weight)  # a digest has read a few numbers, and the system has mapped many pages around each
    copy_from_files(module, files, skip=nn.Linear)  # first, because a linear layer can share a tied weight
    grouped = {id(layer) for joined in groups for layer in joined.layers}
    work = [*groups, *(Joined((parent, name)) for parent in module.modules() for name, child in parent.named_children()
                       if _is_plain(child) and id(child) not in grouped)]
    work.sort(key=lambda joined: -joined.outputs)  # the largest first: copies are freed before most others exist
    if quantization is not None:
        for joined in work:  # measured now, since the threads would disturb it
            fastest_kernel(joined.outputs, joined.layers[0].in_features)

    def pack_one(joined: Joined) -> None:
        weights = [layer.weight for layer in joined.layers if _is_plain(layer)]
        joined.pack(quantization, dtype)
        for weight in weights:
            files.release(weight)

    with ThreadPoolExecutor(min(WORKERS, torch.get_num_threads())) as pool:  # FBGEMM packs in one thread
        list(tqdm(pool.map(pack_one, work), total=len(work), desc="packing weights", unit="layer", leave=False,
                  disable=None))
    copy_from_files(module, files, dtype=dtype)


def _is_stock(layer: nn.Module) -> bool:
    """Whether it is torch's own linear layer with a plain weight, its own forward and no hooks."""
    return (type(layer) is nn.Linear and type(layer.weight.data) is Tensor and "forward" not in vars(layer)
            and not is_hooked(layer))


def _is_plain(layer: nn.Module) -> bool:
    """Whether it can be packed: it is stock, and its weight on a CPU."""
    return _is_stock(layer) and layer.weight.device.type == "cpu" and torch.backends.mkldnn.is_available()


def dtype_of(layer: nn.Module) -> torch.dtype:
    """The input dtype of a linear layer, without unpacking its weight."""
    return layer.dtype if isinstance(layer, PackedLinear) else layer.weight.dtype


def device_of(module: nn.Module) -> torch.device:
    """The device that a module computes on: that of its weights, or the execution device of offloaded ones."""
    if isinstance(module, PackedLinear):
        return torch.device("cpu")
    first = next(part for part in module.modules() if any(True for _ in part.parameters(recurse=False)))
    weight = next(first.parameters(recurse=False))
    hook = getattr(first, "_hf_hook", None)
    return torch.device(hook.execution_device) if weight.is_meta and hook is not None else weight.device


def packed_layers(module: nn.Module) -> list[PackedLinear]:
    return [layer for layer in module.modules() if isinstance(layer, PackedLinear)]


def packed_form(module: nn.Module) -> str | None:
    """The form of a module's packed weights, the `NAME` of a `Form`; None: all are plain."""
    names = {layer.packed.NAME for layer in packed_layers(module)}
    return next((form.NAME for form in CLASSES.values() if form.NAME in names), max(names, default=None))


def packed_kernels(module: nn.Module) -> list[str]:
    """The kernels of a module's int8 layers, by shape."""
    return sorted({f"{layer.packed.product.NAME} {layer.packed.outputs} x {layer.in_features}"
                   for layer in packed_layers(module) if isinstance(layer.packed, Int8)})


def is_int8(module: nn.Module) -> bool:
    """Whether layers of a module are packed as int8."""
    return any(isinstance(layer.packed, Int8) for layer in packed_layers(module))


def check_quantization(form: object) -> None:
    """Raise ValueError unless the form is None, or one of int8 on a processor with the instructions for it."""
    if form is not None and form not in QUANTIZATIONS:
        raise ValueError(f"quantization must be one of {', '.join(QUANTIZATIONS)}, or None, got {form!r}")
    if form is not None and not (torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()):
        raise ValueError(f'quantization="{form}" needs an x86 processor with VNNI instructions (AVX-512 VNNI or '
                         "AVX-VNNI) and torch with oneDNN; elsewhere omit it, or pass a quantization_config of "
                         "transformers")

"""Compiled forwards of the target and the draft head, for trees of any size behind prefixes of any length.

The stock modules are traced as they are. What a cache holds goes in as plain tensors, so that nothing that changes from
call to call is baked into a graph; of dynamo's guards only those on tensors and sizes are kept, since testing the
thousands on a model's modules takes longer than some of its layers.

B batch, N tokens of a forward, L prefix length, C capacity of a cache, H key/value heads, F width of features.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..heads.eagle import DraftHead
from ..models.admission import FULL
from ..models.cache import TreeCache
from ..models.implementations import SPLIT
from ..models.target import HALF_PARITY, PARITY, TargetModel

log = logging.getLogger(__name__)
# Of the warm-up. Numbers that no model has, since a graph asks sizes that were equal to be so again.
PREFIX, NODES, BATCH, CAPACITY = 37, 29, 13, 97


class CacheView:
    """What one forward reads of a cache and writes to it, under the names that stock modules use."""

    def __init__(
        self,
        keys: Sequence[Tensor],  # per layer [B, H, C, D]
        values: Sequence[Tensor],
        places: Tensor,  # [N], L to L + N - 1
        end: int,  # L + N
    ) -> None:
        self.keys, self.values, self.places, self.end = keys, values, places, end

    def update(self, key_states: Tensor, value_states: Tensor, layer: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append [B, H, N, D] keys and values; returns those of all places."""
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(2, self.places, key_states)
        values.index_copy_(2, self.places, value_states)
        return keys[:, :, : self.end], values[:, :, : self.end]

    def get_seq_length(self, *args) -> int:
        return self.end - len(self.places)


def _on_inputs(guards: Sequence) -> list[bool]:
    """Which guards to keep: not those on the model, which is not to change."""
    return [
        guard.guard_type in ("SHAPE_ENV", "GLOBAL_STATE")
        or (guard.guard_type == "TENSOR_MATCH" and not isinstance(guard.value, nn.Parameter))
        for guard in guards
    ]


class CompiledForward:
    """A forward that appends to a cache, compiled.

    It compiles while `compiles` is set: while warming up, or always where there is no warm-up. What no graph fits runs
    uncompiled otherwise.

    Args:
        forward: function of a cache and of keywords.
        backend: of `torch.compile`.
    """

    def __init__(self, forward: Callable[..., Tensor], backend: str) -> None:
        def run(keys: list[Tensor], values: list[Tensor], places: Tensor, end: int, arguments: dict) -> Tensor:
            return forward(CacheView(keys, values, places, end), **arguments)

        # Graphs are kept by code object: a shared one would mix up models, with the guards on them gone.
        run.__code__ = run.__code__.replace(co_name="run_compiled")
        options = {"guard_filter_fn": _on_inputs}
        self._run = torch.compile(run, fullgraph=True, dynamic=True, backend=backend, options=options)
        self.compiles = False

    def __call__(self, cache: TreeCache, count: int, **arguments: object) -> Tensor:
        """`forward` of these keywords, with `count` tokens appended to the cache."""
        end, rows = cache.length + count, cache.rows
        assert end <= cache.capacity, f"{end} positions exceed the capacity of {cache.capacity}"
        keys, values = [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]
        if rows != slice(0, cache.batch):
            keys, values = [held[rows] for held in keys], [held[rows] for held in values]
        with torch.compiler.set_stance("default" if self.compiles else "eager_on_recompile"):
            places = torch.arange(cache.length, end, device=keys[0].device)
            result = self._run(keys, values, places, end, _copied(arguments))
        for layer in cache.layers:
            layer.length = end
        return result


def _copied(given: object) -> object:
    """Tensors laid out as new ones of their shape: a graph takes no other strides, and not those of a view."""
    if isinstance(given, dict):
        return {name: _copied(value) for name, value in given.items()}
    return given.clone(memory_format=torch.contiguous_format) if isinstance(given, Tensor) else given


def _fits(cache: TreeCache | None, mask: object) -> bool:
    """Whether a forward is one of trees behind a prefix, as graphs are compiled for; a prefill comes without a mask."""
    return mask is not None and cache is not None and cache.length > 0 and torch.is_inference_mode_enabled()


class CompiledDecoder(nn.Module):
    """A stock decoder whose forwards of trees are compiled; all others, such as the prefill, stay as they are."""

    def __init__(self, decoder: nn.Module, backend: str = "inductor", *, batches: bool = False) -> None:
        super().__init__()
        self.decoder = decoder
        self.batches = batches  # whether there are graphs for several sequences
        self.graph = CompiledForward(self._last_hidden_state, backend)

    def _last_hidden_state(self, cache: CacheView, **options: object) -> Tensor:
        return self.decoder(past_key_values=cache, **options).last_hidden_state

    def forward(self, input_ids: Tensor, past_key_values: TreeCache | None = None, **options: object) -> object:
        if not _fits(past_key_values, options.get("attention_mask")):
            return self.decoder(input_ids=input_ids, past_key_values=past_key_values, **options)
        last = self.graph(past_key_values, input_ids.shape[1], input_ids=input_ids, **options)
        return _Output(last)


class _Output:
    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state


class CompiledHead:
    """The forward of a draft head, compiled where the tokens come with a mask."""

    def __init__(self, head: DraftHead, backend: str = "inductor") -> None:
        self.stock = head.forward
        self.graph = CompiledForward(lambda cache, **inputs: self.stock(**inputs, cache=cache), backend)

    def __call__(
        self, features: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None = None,
        cache: TreeCache | None = None,
    ) -> Tensor:
        if not _fits(cache, mask):
            return self.stock(features, tokens, positions, mask, cache)
        inputs = {"features": features, "tokens": tokens, "positions": positions, "mask": mask}
        return self.graph(cache, tokens.shape[1], **inputs)


def is_compiled(target: TargetModel) -> bool:
    return isinstance(target.decoder, CompiledDecoder)


def why_not(target: TargetModel) -> str | None:
    """Why the forwards of this target cannot be compiled; None: they may."""
    if target.layers:
        return "its head reads hidden states of several layers"
    if target.config._attn_implementation == SPLIT:  # numbers by layer, which a graph would take for constants
        return "its attention is split"
    return why_not_together(target)


def why_not_together(target: TargetModel) -> str | None:
    """Why a forward of this target cannot be one piece of work, compiled or as a CUDA graph; None: it may."""
    if target.group is not None:
        return "its weights are shared by several processes"
    if target.counts_positions:
        return "it counts positions itself"
    devices = {parameter.device for parameter in target.model.parameters()}
    if len(devices) > 1 or any(hasattr(module, "_hf_hook") for module in target.model.modules()):
        return "it is spread over several devices"
    return None


def compile_forwards(
    target: TargetModel, head: DraftHead | None, *, batches: bool = False, warm_up: bool = True,
    backend: str = "inductor",
) -> bool:
    """Compile the forwards of trees, and lay out the weights for few tokens at a time; both in place.

    What cannot be compiled goes on as it is, with the reason in the log.

    Args:
        batches: also for batches of several sequences, which need graphs of their own.
        warm_up: compile now, with a progress bar, and check the graphs against the stock modules. False: at the first
            forward of each kind.
        backend: of `torch.compile`.

    Returns:
        Whether the target is compiled now.
    """
    if is_compiled(target):
        if target.decoder.batches or not batches:
            return True
        target.decoder = target.decoder.decoder  # once more, with graphs for both
        if head is not None:
            del head.forward
    if target.group is None:
        for module in filter(None, (target.decoder, head)):
            lay_out_weights(module)
    stock, reason = target.decoder, why_not(target)
    if reason is None:
        target.decoder = CompiledDecoder(stock, backend, batches=batches)
        graphs = [target.decoder.graph]
        if head is not None:
            head.forward = CompiledHead(head, backend)
            graphs.append(head.forward.graph)
        for graph in graphs:
            graph.compiles = True
        if not warm_up:
            return True
        try:
            _warm_up(target, head, [1, BATCH] if batches else [1])
            for graph in graphs:
                graph.compiles = False
            return True
        except BaseException as error:  # whatever tracing, code generation or the C++ compiler end in, or Ctrl-C
            target.decoder = stock
            if head is not None:
                del head.forward
            if not isinstance(error, Exception):
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    log.warning("%s runs uncompiled: %s", type(target.model).__name__, reason)
    return False


def lay_out_weights(module: nn.Module) -> None:
    """Store the matrices of linear layers column by column, in place; shapes and values stay.

    For float32 on CPUs: a product with 4 to 16 tokens then takes 0.6 to 0.9 of its time, with 1 or 2 the same.
    """
    for layer in module.modules():
        if type(layer) is not nn.Linear or type(layer.weight.data) is not Tensor:  # quantised ones are of other types
            continue
        weight = layer.weight
        if weight.dtype == torch.float32 and weight.is_cpu and weight.is_contiguous():
            weight.data = weight.data.t().contiguous().t()


@torch.inference_mode()
def _warm_up(target: TargetModel, head: DraftHead | None, batches: Sequence[int]) -> None:
    """Compile every kind of forward.

    Raises:
        ValueError: a graph does not give what the stock modules give.
    """
    kinds = [(batch, nodes) for batch in batches for nodes in (NODES, 1)]
    work = [(name, forward, *kind) for kind in kinds
            for name, forward in (("target", _target_forward), ("draft head", _head_forward))
            if name == "target" or head is not None]
    progress = tqdm(work, desc="compiling", unit="graph", leave=False, disable=None)
    for name, forward, batch, nodes in progress:
        progress.set_postfix_str(f"{name}, {batch} x {nodes}")
        stock, compiled = forward(target, head, batch, nodes)
        difference = ((compiled - stock).float().norm() / stock.float().norm()).item()
        if not difference <= (PARITY if target.dtype in FULL else HALF_PARITY):
            raise ValueError(f"compiled features of the {name} differ by {difference:.1g} of their size")


def _target_forward(target: TargetModel, head: DraftHead | None, batch: int, nodes: int) -> tuple[Tensor, Tensor]:
    """Features [B, N, F] of a chain behind a prefix: by the stock decoder, and compiled."""
    compiled = target.decoder
    cache = target.new_cache(CAPACITY, batch)
    tokens = (torch.arange(batch * (PREFIX + nodes), device=target.device) * 7 % target.vocab_size).view(batch, -1)
    target.prefill(tokens[:, :PREFIX], cache)
    positions = torch.arange(PREFIX, PREFIX + nodes, device=target.device).expand(batch, -1)
    chain = torch.ones(batch, nodes, nodes, dtype=torch.bool, device=target.device).tril()
    once = functools.partial(_once, cache, lambda: target.verify(tokens[:, PREFIX:], positions, chain, cache))
    target.decoder = compiled.decoder
    try:
        stock = once()
    finally:
        target.decoder = compiled
    return stock, once()


def _head_forward(target: TargetModel, head: DraftHead, batch: int, nodes: int) -> tuple[Tensor, Tensor]:
    """Predicted features [B, N, D] of the head, in the same two ways."""
    cache, count = head.new_cache(CAPACITY, batch), PREFIX + nodes
    tokens = (torch.arange(batch * count, device=head.device) * 7 % target.vocab_size).view(batch, -1)
    features = head.embed_tokens(tokens).to(head.dtype)
    if features.shape[-1] != head.config.hidden_size:
        features = features.new_ones(batch, count, head.config.hidden_size)
    positions = torch.arange(count, device=head.device).expand(batch, -1)
    mask = torch.zeros(batch, 1, nodes, count, dtype=head.dtype, device=head.device)
    inputs = [each[:, PREFIX:] for each in (features, tokens, positions)]
    head.forward.stock(*(each[:, :PREFIX] for each in (features, tokens, positions)), None, cache)
    return (_once(cache, lambda: head.forward.stock(*inputs, mask, cache)),
            _once(cache, lambda: head(*inputs, mask, cache)))


def _once(cache: TreeCache, forward: Callable[[], Tensor]) -> Tensor:
    result = forward().clone()
    cache.truncate(PREFIX)
    return result

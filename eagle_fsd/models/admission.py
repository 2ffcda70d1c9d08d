"""Which causal LMs can verify a tree: what their configs say, and what comes of trying.

B batch, N tokens of a forward, D hidden size.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .implementations import IMPLEMENTATIONS
from .masks import kinds_of
from .parallel import of_all, plain_parts

if TYPE_CHECKING:
    from .target import TargetModel

log = logging.getLogger(__name__)

FULL = (torch.float32, torch.float64)
ATTENTION_KINDS = ("full_attention", "sliding_attention", "chunked_attention")  # layers whose cache is rows of keys
ROUNDING = 0.05  # of the largest logit: what half precision or quantised activations may change, see `check_logits`


def check_config(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Refuse models that are no causal LMs, or whose layers or attention cannot verify a tree.

    Args:
        config: of the language model.
    """
    name, kinds = type(model).__name__, kinds_of(config)
    if getattr(model.config, "is_encoder_decoder", False) or model.get_output_embeddings() is None:
        raise ValueError(f"{name} is not supported: a decoder-only causal LM with an output head is needed")
    unknown = kinds - set(ATTENTION_KINDS)
    if unknown or (getattr(model, "_is_stateful", False) and not kinds):
        raise ValueError(
            f"{name} is not supported: it has layers of type {', '.join(sorted(unknown)) or 'recurrent state'}; "
            "only those of full, sliding or chunked attention can verify a tree and be rolled back to a path of it"
        )
    if config._attn_implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"attention implementation {config._attn_implementation!r} takes no tree mask; "
            f"accepted: {', '.join(IMPLEMENTATIONS)} (attn_implementation= of load())"
        )


def find_layers(decoder: nn.Module, config: PreTrainedConfig, name: str) -> nn.ModuleList:
    """The decoder's list of layers, whatever it is called."""
    for module in decoder.children():
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers:
            return module
    raise ValueError(f"{name} is not supported: its decoder has no list of layers to place a cache for")


@torch.inference_mode()
def check_weights(model: PreTrainedModel, group: dist.ProcessGroup | None) -> None:
    """Refuse damaged weights; a finite sum, which is quicker to take, already shows that all are finite."""
    damaged = None
    for parameter, weight in model.named_parameters():
        for part in plain_parts(weight):
            if part.is_meta or not part.is_floating_point() or part.element_size() == 1:
                continue
            if not part.sum(dtype=torch.float32).isfinite() and not part.isfinite().all():
                damaged = damaged or parameter
    damaged = next(filter(None, of_all(group, damaged)), None)
    if damaged is not None:
        raise ValueError(f"{type(model).__name__} is damaged: its {damaged} holds values that are not finite")


@torch.inference_mode()
def check_logits(target: TargetModel) -> None:
    """Refuse models whose head, masks or positions do more than we know of: our logits must be the model's own."""
    name = type(target.model).__name__
    # Two tokens, then a tree 0 - 1 - 2, 0 - 3 - 4: its second branch is at other positions than its rows.
    tokens = torch.arange(7, device=target.device)[None] % target.vocab_size
    branches = torch.stack([tokens[0, [0, 1, 2, 3, 4]], tokens[0, [0, 1, 2, 5, 6]]])
    try:
        stock = target.model(input_ids=branches, use_cache=False).logits.float().to(target.output_device)
    except (AttributeError, RuntimeError) as error:
        if target.group is None:
            raise
        raise ValueError(f"{name} cannot be shared by {target.group.size()} processes: its heads are not divisible "
                         f"by that, or its quantisation cannot be sharded ({error})") from error
    if not stock.isfinite().all():
        raise ValueError(f"{name} is not supported: its logits are not finite in {target.dtype}")
    stock = torch.cat([stock[0], stock[1, 3:]])
    ancestors = torch.tensor(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 1, 1]], device=target.device
    ).bool()[None]
    cache = target.new_cache(7)
    try:
        features = [
            target.prefill(tokens[:, :2], cache),
            target.verify(tokens[:, 2:], torch.tensor([[2, 3, 4, 3, 4]], device=target.device), ancestors, cache),
        ]
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{name} is not supported: it cannot verify a tree ({error})") from error
    ours = target.logits(torch.cat(features, 1))[0]
    largest = stock.abs().max().item()
    if torch.allclose(stock, ours, rtol=1e-3, atol=1e-3 * largest):
        return
    error, quantised = (stock - ours).abs().max().item() / largest, getattr(target.model, "is_quantized", False)
    if not ((quantised or target.dtype not in FULL) and error <= ROUNDING):
        raise ValueError(
            f"{name} is not supported: its logits are not lm_head(last hidden state) with a scale and a softcap, "
            "or depend on more than the positions and keys that a tree mask shows"
        )
    if quantised:
        log.warning("%s is quantised so that its logits change with the tokens beside them, by up to %.1f%% of the "
                    "largest: where its best two are closer, the text may not be that of plain decoding", name,
                    100 * error)


@torch.inference_mode()
def tree_of_two_rows(target: TargetModel) -> Tensor:
    """[2, 5, D] float32: features of a tree behind 9 tokens in one row and behind the first 5 in the other."""
    cache, lengths = target.new_cache(14, 2), torch.tensor([9, 5], device=target.device)
    tokens = (torch.arange(28, device=target.device).view(2, 14) * 7 + 1) % target.vocab_size
    target.prefill(tokens[:, :9], cache)
    parents = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]])
    ancestors = parents.bool().to(target.device).expand(2, -1, -1)
    positions = lengths[:, None] + ancestors.sum(-1) - 1
    if target.counts_positions:
        cache.skew = positions[0] - torch.arange(9, 14, device=target.device)
    seen = target.masks(ancestors, positions, 9, torch.arange(9, device=target.device) < lengths[:, None])
    features = target.features(tokens[:, 9:], position_ids=positions, past_key_values=cache, use_cache=True, **seen)
    return features[..., -target.hidden_size :].float()

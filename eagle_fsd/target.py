"""Adapter over any causal LM of `transformers`: features, logits, caches and tree masks.

B batch, N tokens of a forward, L prefix length, D hidden size, V vocabulary.
"""

from __future__ import annotations

import copy

import torch
from accelerate.hooks import remove_hook_from_module
from torch import Tensor, nn
from transformers import PreTrainedModel

from .attention import apply_window, tree_mask
from .cache import TreeCache

MASKED_IMPLEMENTATIONS = ("sdpa", "eager")  # those that take an arbitrary 4D mask


class TargetModel:
    """A stock causal LM seen as the method sees it: `features` = last hidden state, `logits` = head(features).

    Args:
        check: compare our logits with the model's own on a few tokens; skip it for a model that has passed.

    Raises:
        ValueError: a model that cannot be verified with a tree: no rollback of its cache, an attention
            implementation without arbitrary masks, or logits that are not the model's own when computed our way; or
            one with weights that are not finite.
    """

    def __init__(self, model: PreTrainedModel, *, check: bool = True) -> None:
        self.model = model.eval()
        self.config = model.config.get_text_config(decoder=True)
        name = type(model).__name__
        if getattr(model.config, "is_encoder_decoder", False) or model.get_output_embeddings() is None:
            raise ValueError(f"{name} is not supported: a decoder-only causal LM with an output head is needed")
        self.decoder: nn.Module = model.get_decoder()
        if not hasattr(self.decoder, "layers"):
            raise ValueError(f"{name} is not supported: its decoder has no list of layers to place a cache for")
        self.lm_head: nn.Module = model.get_output_embeddings()
        self.embed_tokens: nn.Module = model.get_input_embeddings()
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.lm_head.weight.shape[0]
        self.softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self.max_positions: int | None = getattr(self.config, "max_position_embeddings", None)
        self._check_attention(name)
        if check:
            self._check_weights(name)
            self._check_logits(name)

    def _check_attention(self, name: str) -> None:
        kinds = set(getattr(self.config, "layer_types", None) or [])
        unknown = kinds - {"full_attention", "sliding_attention"}
        if unknown or getattr(self.model, "_is_stateful", False):
            raise ValueError(
                f"{name} is not supported: layers of type {', '.join(sorted(unknown)) or 'recurrent state'} keep a "
                "state that cannot be rolled back to an accepted path; full or sliding attention is needed"
            )
        implementation = self.config._attn_implementation
        if implementation not in MASKED_IMPLEMENTATIONS:
            raise ValueError(
                f"attention implementation {implementation!r} takes no tree mask; "
                f"accepted: {', '.join(MASKED_IMPLEMENTATIONS)} (attn_implementation= of load())"
            )
        window = getattr(self.config, "sliding_window", None)
        self.window: int | None = window if not kinds or "sliding_attention" in kinds else None
        # Models with layer_types take one mask per type; the others (Llama, Mistral, Mixtral) take one for all.
        self.mask_by_type = "sliding_attention" in kinds

    @torch.inference_mode()
    def _check_weights(self, name: str) -> None:
        """Refuse damaged weights; a finite sum, which is quicker to take, already shows that all are finite."""
        for parameter, weight in self.model.named_parameters():
            if weight.is_meta or not weight.is_floating_point() or weight.element_size() == 1:
                continue
            if not weight.sum(dtype=torch.float32).isfinite() and not weight.isfinite().all():
                raise ValueError(f"{name} is damaged: its {parameter} holds values that are not finite")

    @torch.inference_mode()
    def _check_logits(self, name: str) -> None:
        """Refuse models whose head, masks or positions do more than we know of: our logits must be the model's own."""
        tokens = torch.arange(4, device=self.device)[None] % self.vocab_size
        stock = self.model(input_ids=tokens, use_cache=False).logits.float().to(self.output_device)
        if not stock.isfinite().all():
            raise ValueError(f"{name} is not supported: its logits are not finite in {self.dtype}")
        cache, chain = self.new_cache(4), torch.ones(1, 2, 2, dtype=torch.bool, device=self.device).tril()
        try:
            features = [
                self.prefill(tokens[:, :2], cache),
                self.verify(tokens[:, 2:], torch.tensor([[2, 3]], device=self.device), chain, cache),
            ]
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"{name} is not supported: it cannot verify a tree ({error})") from error
        ours = self.logits(torch.cat(features, 1))
        if not torch.allclose(stock, ours, rtol=1e-3, atol=1e-3 * stock.abs().max().item()):
            raise ValueError(
                f"{name} is not supported: its logits are not lm_head(last hidden state) with a softcap, or depend on "
                "more than the positions and keys that a tree mask shows"
            )

    @property
    def device(self) -> torch.device:
        """Where tokens go in."""
        return self.embed_tokens.weight.device

    @property
    def output_device(self) -> torch.device:
        """Where features and logits come out, and the head lives; with a `device_map` often another one."""
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype if self.lm_head.weight.is_floating_point() else self.model.dtype

    def embeddings_on(self, device: torch.device) -> nn.Module:
        """The token embeddings; a copy where they live on another device, as with a `device_map`."""
        return self.embed_tokens if self.device == device else copy_to(self.embed_tokens, device)

    def digest(self) -> str:
        """What tells one target from another, whatever dtype it is loaded in: its shape and a sample of its weights."""
        return f"{type(self.model).__name__}/{self.hidden_size}/{self.vocab_size}/{weights_digest(self.model)}"

    def new_cache(self, capacity: int) -> TreeCache:
        """An empty cache for `capacity` positions."""
        devices = [next(layer.parameters()).device for layer in self.decoder.layers]
        return TreeCache(devices, capacity)

    def prefill(self, tokens: Tensor, cache: TreeCache) -> Tensor:
        """Features [B, N, D] of a prompt [B, N], through the model's own causal mask."""
        return self.decoder(input_ids=tokens, past_key_values=cache, use_cache=True).last_hidden_state

    def verify(
        self,
        tokens: Tensor,  # [B, N]
        positions: Tensor,  # [B, N]
        ancestors: Tensor,  # [B, N, N] bool
        cache: TreeCache,
    ) -> Tensor:  # [B, N, D]
        """Features of tree nodes; their keys and values are appended to the cache in node order."""
        prefix = cache.length
        mask = tree_mask(ancestors, prefix, self.dtype)
        if self.max_positions is not None:  # nodes beyond the last position are never emitted, but have to be embedded
            positions = positions.clamp_max(self.max_positions - 1)
        if self.window is not None:
            committed = torch.arange(prefix, device=positions.device).expand(len(positions), -1)
            windowed = apply_window(mask, positions, torch.cat([committed, positions], 1), self.window)
            mask = {"full_attention": mask, "sliding_attention": windowed} if self.mask_by_type else windowed
        return self.decoder(
            input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
        ).last_hidden_state

    def logits(self, features: Tensor) -> Tensor:
        """Raw next-token logits [..., V] in float32."""
        return output_logits(self.lm_head, features, self.softcap)


def weights_digest(module: nn.Module) -> str:
    """A number from a few of each parameter's values in bf16; those that are offloaded do not count."""
    total = 0.0
    for number, weight in enumerate(module.parameters(), 1):
        if not weight.is_meta:
            values = weight.detach().flatten()[:: max(1, weight.numel() // 97)]
            total += values.to(torch.bfloat16).double().sum().item() / number
    return f"{total:.9g}"


def output_logits(lm_head: nn.Module, features: Tensor, softcap: float | None) -> Tensor:
    """[..., D] -> [..., V] in float32, capped where the target caps its logits."""
    logits = lm_head(features).float()
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def copy_to(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy on another device, without the hooks that accelerate placed it with."""
    return remove_hook_from_module(copy.deepcopy(module)).to(device)

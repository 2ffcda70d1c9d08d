"""Checks at load: that a model can verify a tree, and that its logits of one are those of its own forward.

B rows of the check, N = 5 nodes of its tree, V vocabulary.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, PreTrainedModel

from . import IMPLEMENTATIONS
from .masks import CHUNKED, SLIDING, attention_kinds

log = logging.getLogger(__name__)

FULL_PRECISION = (torch.float32, torch.float64)
# Tolerated error, relative to the largest logit: full precision; half or quantised. In bfloat16 the logits of a model
# of 8 billion random weights differ from float32's by 0.055, and those of the fused decoder by 0.046 (on an H200).
TOLERANCE, HALF_TOLERANCE = 1e-3, 0.1
# The tree:  0 - 1 - 3 - 4, 0 - 2.  Positions differ from row numbers.
TREE_MASK = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]]).bool()
TREE_PATHS = [0, 1, 3, 4], [0, 2]
TEXT_LENGTHS = 9, 5  # tokens before the tree, in each row
STRUCTURES = 4  # of each model that are remembered as checked

# For each model that has passed the check, by whether `FusedDecoder` was asked for and `target.read_structure`: why
# the fused decoder does not serve it, or None if it does. Threads share these dictionaries: none changes.
PASSED: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple, str | None]] = weakref.WeakKeyDictionary()


def check_config(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Raise ValueError unless the model is a causal LM whose layers and attention can verify a tree.

    Args:
        config: of the language model.
    """
    name, kinds = type(model).__name__, attention_kinds(config)
    if getattr(model.config, "is_encoder_decoder", False) or model.get_output_embeddings() is None:
        raise ValueError(f"{name} is not supported: a decoder-only causal LM with an output head is needed")
    unknown = kinds - {"full_attention", SLIDING, CHUNKED}  # only these cache one row of keys per position
    if unknown or (model._is_stateful and not kinds):
        raise ValueError(
            f"{name} is not supported: it has layers of type {', '.join(sorted(unknown)) or 'recurrent state'}; "
            "only layers of full, sliding or chunked attention can verify a tree and be rolled back to one of its paths"
        )
    if config._attn_implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"attention implementation {config._attn_implementation!r} does not accept a tree mask; "
            f"accepted: {', '.join(IMPLEMENTATIONS)} (attn_implementation= of load())"
        )


@contextmanager
def refused(problem: str) -> Iterator[None]:
    """Raise a model's errors as ValueError, with what they mean for us; not those of a full or broken device."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{problem} ({error})") from error


class TreeCheck:
    """Compares logits of a tree with those of the model's own forward over each path as plain text.

    They must be equal with any implementation: stock decoder, another attention, fused decoder. The tree is in two
    rows, after texts of different lengths; in one row if the model takes positions from the cache.

    Args:
        adapter: a `target.CausalLM`.

    Raises:
        ValueError: the model's own forward fails, or its logits are not finite.
    """

    @torch.inference_mode()
    def __init__(self, adapter: Any) -> None:
        model, self.lengths = adapter.model, TEXT_LENGTHS[: 1 if adapter.positions_from_cache else 2]
        size = TEXT_LENGTHS[0] + len(TREE_MASK)
        tokens = torch.arange(len(self.lengths) * size, device=adapter.input_device).view(-1, size) * 7 + 1
        self.texts, self.trees = (tokens % adapter.vocab_size).split([TEXT_LENGTHS[0], len(TREE_MASK)], 1)
        cases = [(row, length, path) for row, length in enumerate(self.lengths) for path in TREE_PATHS]
        plain = [torch.cat([self.texts[row, :length], self.trees[row, path]]) for row, length, path in cases]
        with refused(f"{type(model).__name__} is not supported: its own forward fails"):
            logits = model(input_ids=pad_sequence(plain, True), use_cache=False).logits.float()
        if not logits.isfinite().all():
            raise ValueError(f"{type(model).__name__} is damaged or not supported: its logits are not finite in "
                             f"{adapter.dtype}")
        self.expected = logits.new_empty(*self.trees.shape, logits.shape[-1])  # [B, N, V]
        for (row, length, path), path_logits in zip(cases, logits, strict=True):
            self.expected[row, path] = path_logits[length : length + len(path)]

    @torch.inference_mode()
    def compare(self, adapter: Any, forward: Any) -> None:
        """Raise ValueError unless the logits of the tree by `prefill` and `verify` are as expected, with this
        `target.Forward` in place of the adapter's own."""
        adapter = copy.copy(adapter)
        adapter.computation, rows, place = forward, len(self.lengths), adapter.input_device
        with refused("it cannot verify a tree"):
            cache = adapter.new_cache(TEXT_LENGTHS[0] + len(TREE_MASK), rows)
            adapter.prefill(self.texts, cache)
            cache.commit([0] * rows, [range(length) for length in self.lengths])
            ancestors = TREE_MASK.to(place).expand(rows, -1, -1)
            positions = torch.tensor(self.lengths, device=place)[:, None] + ancestors.sum(-1) - 1
            logits = adapter.logits(adapter.verify(self.trees, positions, ancestors, cache))
        expected = self.expected.to(logits.device)
        error = ((logits - expected).abs().max() / expected.abs().max()).item()
        quantised = getattr(adapter.model, "is_quantized", False)
        if not error <= (TOLERANCE if adapter.dtype in FULL_PRECISION and not quantised else HALF_TOLERANCE):
            raise ValueError(f"its logits of a tree are not those of its own forward (they differ by {error:.1g} of "
                             "the largest)")
        if quantised and error > TOLERANCE:
            log.warning("%s is quantised so that its logits depend on the other tokens of a forward, by up to %.1f%% "
                        "of the largest: where the best two are closer, the text can differ from plain decoding",
                        type(adapter.model).__name__, 100 * error)

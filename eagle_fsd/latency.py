"""What a decode cycle costs on this machine, by the size of its tree."""

from __future__ import annotations

import json
import logging
import os
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from .acceptance import make_rule
from .config import TreeConfig
from .draft import DraftHead
from .drafting import draft_tree
from .files import save_atomically
from .generation import Decoder, Settings
from .target import TargetModel, weights_digest
from .tree import ancestors_of

log = logging.getLogger(__name__)

NODES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
TOP_K = (1, 2, 3, 4, 6, 8, 10)
CONTEXT = 256  # tokens before the measured cycles
REPEATS = 7


@dataclass(frozen=True)
class Latency:
    """Seconds of the parts of a cycle; linear between what was measured.

    Args:
        verify: target forward with output layer, by nodes. level: a draft level after the first, by top_k. first_level:
            reading the accepted tokens and drafting the first level. rest: everything else in a cycle with a tree.
        plain: a whole cycle without drafting.
    """

    verify: Mapping[int, float]
    level: Mapping[int, float]
    first_level: float
    rest: float
    plain: float

    def cycle(self, nodes: float, levels: float, top_k: int) -> float:
        """Seconds of a cycle that drafts so many levels (at least 1) and verifies so many nodes."""
        return self.first_level + (levels - 1) * between(self.level, top_k) + between(self.verify, nodes) + self.rest


def between(measured: Mapping[int, float], at: float) -> float:
    """Linear between the measured points and beyond the last two, constant before the first."""
    points = sorted(measured)
    if at <= points[0] or len(points) == 1:
        return measured[points[0]]
    right = min(max(1, bisect_left(points, at)), len(points) - 1)
    low, high = points[right - 1], points[right]
    share = (at - low) / (high - low)
    return (1 - share) * measured[low] + share * measured[high]


@torch.inference_mode()
def measure(target: TargetModel, head: DraftHead) -> Latency:
    """Run the parts of a cycle behind a context of random tokens: a few seconds for a small model."""
    room = max(NODES) + 1
    context = min(CONTEXT, (target.max_positions or CONTEXT + room) - room - 16)
    if context < 1:
        raise ValueError(f"a target with {target.max_positions} positions has no room to measure its latency in")
    prompt = torch.randint(target.vocab_size, (context,), generator=torch.Generator().manual_seed(0)).tolist()

    def decoder(tree: TreeConfig | None) -> Decoder:
        settings = Settings(make_rule("exact"), tree or TreeConfig(2, 1, 1), transformers.LogitsProcessorList(), True,
                            0, 2 * room)
        started = Decoder(target, head if tree else None, prompt, settings)
        started.prefill()
        return started

    width = min(max(TOP_K), target.vocab_size)
    drafting = decoder(TreeConfig(room, 2, width))

    def verify(nodes: int) -> None:
        target.logits(target.verify(*_chain(nodes, context, target), drafting.cache))
        drafting.cache.truncate(context)

    def draft(top_k: int, depth: int) -> None:
        draft_tree(head, target, drafting.next_features, drafting.next_tokens, drafting.draft_cache,
                   TreeConfig(16, depth, top_k))

    draft(1, 1)  # reads the prompt
    held = drafting.draft_cache.length
    drafting.next_features, drafting.next_tokens = drafting.next_features[:, -3:], drafting.next_tokens[:, -3:]

    def draft_again(top_k: int, depth: int) -> float:
        def once() -> None:
            drafting.draft_cache.truncate(held - 3)
            draft(top_k, depth)

        return _seconds(once, target)

    widths = [top_k for top_k in TOP_K if top_k <= width]
    verified = {nodes: _seconds(lambda n=nodes: verify(n), target) for nodes in NODES}
    short = {top_k: draft_again(top_k, 2) for top_k in widths}
    level = {top_k: max(0.0, (draft_again(top_k, 6) - short[top_k]) / 4) for top_k in widths}
    first_level = draft_again(min(3, width), 1)
    tree = TreeConfig(8, 4, min(3, width))
    whole = _seconds(_step(decoder(tree)), target)
    shown = Latency(verified, level, first_level, 0.0, 0.0).cycle(tree.nodes, tree.depth, tree.top_k)
    return Latency(verified, level, first_level, max(0.0, whole - shown), _seconds(_step(decoder(None)), target))


def _step(decoder: Decoder) -> Callable[[], object]:
    """A cycle from the same state each time."""
    length = decoder.cache.length
    features, tokens, said = decoder.next_features[:, -3:], decoder.next_tokens[:, -3:], list(decoder.tokens)

    def once() -> None:
        decoder.step()  # the first one reads the whole prompt, the others its last three tokens
        decoder.cache.truncate(length)
        decoder.tokens, decoder.next_features, decoder.next_tokens = list(said), features, tokens
        if decoder.head is not None:
            decoder.draft_cache.truncate(length - 3)

    return once


def _chain(nodes: int, prefix: int, target: TargetModel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions and ancestors of a tree of one branch."""
    index = torch.arange(nodes, device=target.device)[None]
    return index % target.vocab_size, index + prefix, ancestors_of((index - 1).clamp(min=0), nodes)


def _seconds(work: Callable[[], object], target: TargetModel) -> float:
    """Median of a few runs after a warm-up."""
    def wait() -> None:
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)

    work()
    work()
    taken = []
    for _ in range(REPEATS):
        wait()
        started = time.perf_counter()
        work()
        wait()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


# On disk -----------------------------------------------------------------------------------------------------


def cache_directory() -> Path:
    """EAGLE_FSD_CACHE, else eagle_fsd in the user's cache directory."""
    given = os.environ.get("EAGLE_FSD_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eagle_fsd"


def circumstances(target: TargetModel, head: DraftHead) -> str:
    """What a latency depends on, as one string."""
    device = target.output_device
    threads = f"{device}, {torch.get_num_threads()} threads"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else threads
    return "; ".join([
        target.digest(), weights_digest(head), str(target.dtype), name, target.config._attn_implementation,
        f"torch {torch.__version__}", f"transformers {transformers.__version__}",
    ])


def known_latency(target: TargetModel, head: DraftHead) -> Latency:
    """From the cache on disk, else measured and kept there."""
    key, path = circumstances(target, head), cache_directory() / "latency.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        stored = {}
    if key in stored:
        entry = stored[key]
        numbers = {name: {int(at): value for at, value in entry[name].items()} for name in ("verify", "level")}
        return Latency(**{**entry, **numbers})
    log.info("measuring how long cycles take with trees of several sizes")
    latency = measure(target, head)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**stored, key: asdict(latency)}, indent=1)
        save_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))
    except OSError as error:
        log.warning("%s cannot be written (%s): latencies are measured again next time", path, error)
    return latency

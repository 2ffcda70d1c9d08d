"""The host's part of a captured cycle: which cycles can be captured, what programs read, and the order of launches.

After the walk of a cycle the draft of the next one is launched, before the host waits for the walk's table. So the
device drafts while the host extends the answers and looks for copies. A request that has ended wastes one draft.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..acceptance import RULES, Rule
from ..acceptance.walk import Step, steps_of
from ..decoding.forwards import Forwards
from ..decoding.processing import CAPTURABLE, share_processors
from ..decoding.request import EXACT, Request
from ..drafting.config import TreeConfig
from ..drafting.copies import Copies
from ..drafting.drafter import weights_key
from ..drafting.join import join_drafts
from ..drafting.language_model import DraftModel
from ..drafting.sizing import Plan
from ..drafting.tree import ORIGINS
from ..heads.eagle import DraftHead
from ..models.target import TargetModel
from .buffers import BUCKET, Buffers, Download, first_nodes
from .capture import Pool
from .join import packed, size_of
from .programs import DraftSettings, WalkSettings, draft, join_copies, verify, walk_and_keep

log = logging.getLogger(__name__)
LARGE = 4096  # capacities up to it are powers of 2, others multiples of it


class Walked(NamedTuple):
    """The result of a cycle for a row."""

    steps: list[Step]
    origins: Sequence[str | None]  # of each node, see `DraftTree.origin_names`
    levels: int  # drafted


@dataclass(frozen=True)
class Settings:
    """What the programs of a cycle depend on besides their shapes."""

    tree: TreeConfig | None  # None: decoding is plain
    copying: bool
    draft: DraftSettings
    walk: WalkSettings
    weights: list[float]  # of the target's noise in drafts, of each row


class Home:
    """The storage of a pair of caches, with the buffers and programs that have its addresses.

    Args:
        forwards: while it exists, and has these caches, the storage is its own.
    """

    def __init__(self, forwards: Forwards) -> None:
        self.owner = weakref.ref(forwards)
        self.target, self.drafter = target, drafter = forwards.target, forwards.drafter
        self.storages = storages_of(forwards)
        for cache, storage in zip(forwards.caches, self.storages, strict=True):
            if cache.batch == 1:  # a masked slot is read too: it must be finite
                storage[..., cache.length :, :].zero_()
        self.pool = Pool(target.output_device)
        # Those that programs in the pool refer to, so that the pool bounds their number, whatever trees requests have.
        self.buffers: WeakValueDictionary[tuple, Buffers] = WeakValueDictionary()
        self.weights = weights_key(target, drafter)

    def belongs_to(self, forwards: Forwards | None) -> bool:
        return forwards is not None and self.owner() is forwards and all(
            any(storage is mine for storage in cache.allocated)
            for mine, cache in zip(self.storages, forwards.caches, strict=True))

    @property
    def free(self) -> bool:
        """Whether no cache in use has one of its storages."""
        owner = self.owner()
        return owner is None or not any(storage is mine for mine in self.storages for cache in owner.caches
                                        for storage in cache.allocated)

    def fits(self, room: int, draft_room: int, rows: int) -> bool:
        """Whether its caches are large enough. Without a drafter `draft_room` is 0."""
        rooms = [room, draft_room] if draft_room else [room]
        return len(rooms) == len(self.storages) and all(
            storage.shape[-2] >= needed and storage.shape[2] >= rows for storage, needed
            in zip(self.storages, rooms, strict=True))

    def buffers_of(self, rows: int, tree: TreeConfig, copying: bool) -> Buffers:
        buffers = self.buffers.get((rows, tree, copying))
        if buffers is None:
            storages = [storage[:, :, :rows] for storage in self.storages]
            buffers = self.buffers[rows, tree, copying] = Buffers(self.target, self.drafter, storages, tree, copying)
        return buffers

    def check_weights(self) -> None:
        """Drop the programs if a weight was replaced or changed."""
        if self.weights != (weights := weights_key(self.target, self.drafter)):
            self.weights = weights
            self.clear()

    def clear(self) -> None:
        """Drop the programs and their buffers."""
        self.pool.clear()
        self.buffers.clear()


class CapturedCycles:
    """Runs those cycles of a pair that captured programs compute with the same results: see `settings_of`.

    Threads may share it, as caches, and with them buffers and programs, belong to one decoder at a time.
    """

    def __init__(self, target: TargetModel, drafter: DraftHead | DraftModel | None) -> None:
        self.target, self.drafter = target, drafter
        self._homes: list[Home] = []  # the most recently used last
        self._lock = threading.Lock()

    @property
    def failed(self) -> Exception | None:
        """Why programs run without graphs on CUDA; None: all were captured."""
        return next((home.pool.failed for home in self._homes if home.pool.failed is not None), None)

    @staticmethod
    def support(target: TargetModel, drafter: DraftHead | DraftModel | None) -> bool:
        """Whether forwards of both models can be captured: computed fused, on one device."""
        devices = {target.device, target.output_device}
        if isinstance(drafter, DraftModel):  # a head is on the target's device
            devices |= {drafter.device, drafter.output_device}
        return len(devices) == 1 and target.fused is not None and (drafter is None or drafter.fused is not None)

    # Caches -------------------------------------------------------------------------------------------------------

    def forwards(self, room: int, draft_room: int, rows: int) -> Forwards:
        """`Forwards` with empty caches, if possible those of a decoder that is no longer used, with their programs.

        Args:
            room, draft_room: positions of each row in the target's and in the drafter's cache; 0: without a drafter.
        """
        with self._lock:
            spare = (home for home in reversed(self._homes) if home.free and home.fits(room, draft_room, rows))
            home = next(spare, None) if self.support(self.target, self.drafter) else None  # a hook may be new
            if home is None:
                capacity = capacity_of(room)
                capacities = [capacity, capacity + draft_room - room] if draft_room else [capacity]
                return self._forwards(capacities, rows, [None, None])
            forwards = self._forwards([storage.shape[-2] for storage in home.storages], home.storages[0].shape[2],
                                      home.storages)
            home.owner = weakref.ref(forwards)
            storages_of(forwards)  # takes the spare ones
            forwards.keep_rows(range(rows))
            return forwards

    def _forwards(self, capacities: Sequence[int], batch: int, spares: Sequence[Tensor | None]) -> Forwards:
        caches = [model.new_cache(capacity, batch, spare) for model, capacity, spare
                  in zip((self.target, self.drafter), capacities, spares, strict=False)]
        return Forwards(self.target, self.drafter if len(caches) > 1 else None, caches[0], *caches[1:] or [None])

    def _home(self, forwards: Forwards) -> Home:
        with self._lock:
            home = next((known for known in self._homes if known.belongs_to(forwards)), None)
            if home is None:
                home = Home(forwards)
                apart = [known for known in self._homes  # one of two caches may have been replaced
                         if not any(one is other for one in known.storages for other in home.storages)]
                free = [known for known in apart if known.free]  # their memory may be needed
                self._homes = [*(known for known in apart if known not in free[:-1]), home]
            return home

    def programs(self, forwards: Forwards) -> dict[str, Callable[[], None]]:
        """The programs of the last cycle of these forwards, by name, to be timed any number of times."""
        home = self._home(forwards)
        latest: dict[str, Callable[[], None]] = {key[0]: program for key, program in home.pool.programs.items()}
        before = [(buffers.lengths, buffers.lengths.clone()) for buffers in home.buffers.values()]
        walk = latest["walk"]

        def walk_again() -> None:
            for lengths, saved in before:
                lengths.copy_(saved)
            walk()

        return latest | {"walk": walk_again}

    # A cycle ------------------------------------------------------------------------------------------------------

    def captures(self, requests: Sequence[Request], rules: Sequence[Rule], plan: Plan) -> Settings | None:
        """The settings of a cycle of these models; None: it cannot be captured."""
        models = [model for model in (self.target, self.drafter) if model is not None]
        if any(model.fused is None or "forward" in vars(model) for model in models):
            return None
        return settings_of(requests, rules, plan)

    @torch.inference_mode()
    def step(
        self, requests: Sequence[Request], forwards: Forwards, rules: Sequence[Rule], plan: Plan,
        copies: Sequence[Copies | None],
    ) -> list[Walked] | None:
        """Run a cycle, up to the new lengths of the caches. None: it cannot be captured, and nothing was changed."""
        settings = self.captures(requests, rules, plan)
        if settings is None:
            return None
        if (settings.tree is None) != (forwards.drafter is None) or settings.tree is None and any(copies):
            return None
        if settings.tree is not None and not all(
                forwards.has_positions(request, settings.tree.depth) for request in requests):
            return None
        device = self.target.output_device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            home = self._home(forwards)
            try:
                return self._step(home, settings, requests, forwards, rules, plan, copies)
            except BaseException:  # the buffers may be ahead of the host
                home.clear()
                raise
            finally:
                home.pool.close_bar()

    def _step(
        self, home: Home, settings: Settings, requests: Sequence[Request], forwards: Forwards, rules: Sequence[Rule],
        plan: Plan, copies: Sequence[Copies | None],
    ) -> list[Walked] | None:
        lengths = forwards.cache.lengths
        read = [] if forwards.draft_cache is None else forwards.draft_cache.lengths
        key = len(requests), settings.tree, settings.copying
        buffers = home.buffers_of(*key)
        if not buffers.holds(requests, lengths, read):
            home.check_weights()
            buffers = home.buffers_of(*key)
        bucket = buffers.bucket(max(lengths) + buffers.most)
        if bucket is None or not self._load(buffers, requests, forwards, lengths, read, settings.weights):
            return None
        if settings.tree is None:
            return self._plain(home, buffers, settings, requests, forwards)
        if buffers.ahead != settings.draft and not self._draft(home, buffers, settings, requests, read):
            return None
        nodes, path, joined = buffers.nodes, buffers.path, any(copies)
        if joined:
            nodes, path = buffers.most, self._join(home, buffers, copies, plan)
        walk = replace(settings.walk, joined=joined)
        if walk.budgeted:
            buffers.upload(buffers.left, [request.remaining_budget for request in requests])
        if walk.marked:
            buffers.upload(buffers.fuzzy, [rule != EXACT for rule in rules])
            buffers.upload(buffers.inside_marks, [request.inside_marks for request in requests])
        download = self._verify(home, buffers, walk, requests, bucket, nodes, path)
        buffers.fed, buffers.ahead = path, None
        self._draft(home, buffers, settings, requests, [length + buffers.lead for length in lengths])
        table, *joined_origins = download.wait()  # the only wait
        origins = [[None, *[ORIGINS[0]] * (nodes - 1)]] * len(requests)
        if joined:
            origins = [[None if number < 0 else ORIGINS[number] for number in row] for row in joined_origins[0]]
        return self._finish(buffers, forwards, lengths, read, table, origins)

    def _verify(
        self, home: Home, buffers: Buffers, walk: WalkSettings, requests: Sequence[Request], bucket: int, nodes: int,
        path: int,
    ) -> Download:
        """Launch the target's forward and the walk."""
        processors = requests[0].params.processors
        home.pool.run(("verify", buffers.key, bucket, nodes), partial(verify, buffers, self.target, bucket, nodes))
        home.pool.run(("walk", buffers.key, walk, nodes, path),
                      partial(walk_and_keep, buffers, self.target, walk, processors, nodes, path))
        return buffers.download(buffers.table(path), *([buffers.origins] if walk.joined else []))

    def _plain(
        self, home: Home, buffers: Buffers, settings: Settings, requests: Sequence[Request], forwards: Forwards
    ) -> list[Walked]:
        """A cycle without drafting. The next one needs nothing from the host and is launched first."""
        lengths, tables = forwards.cache.lengths, [buffers.ahead]
        for ahead in range(2):
            bucket = buffers.bucket(max(lengths) + ahead + 1)
            if tables[ahead] is None and bucket is not None:
                tables[ahead] = self._verify(home, buffers, settings.walk, requests, bucket, 1, 1)
            tables.append(None)
        buffers.ahead = tables[1]
        return self._finish(buffers, forwards, lengths, [], *tables[0].wait(), [[None]] * len(requests))

    def _join(self, home: Home, buffers: Buffers, copies: Sequence[Copies | None], plan: Plan) -> int:
        """Add copies to the trees; returns P, the steps of the longest path."""
        size = size_of(copies)
        if size is None or buffers.most > buffers.wide + size:  # on the host, which waits for the draft
            wide = first_nodes(buffers.wide_tree, buffers.wide, buffers.config.depth, joined=False)
            tree = join_drafts(wide, copies, plan)
            buffers.store(tree)
            return buffers.path_for(tree.max_depth + 1)
        *columns, deepest = packed(copies, size)
        for buffer, values in zip(buffers.copies(size), columns, strict=True):
            buffers.upload(buffer, values)
        path = buffers.path_for(min(max(deepest, buffers.config.depth) + 1, buffers.most))
        home.pool.run(("join", buffers.key, size, path), partial(join_copies, buffers, size, path))
        return path

    def _load(
        self, buffers: Buffers, requests: Sequence[Request], forwards: Forwards, lengths: list[int], read: list[int],
        weights: list[float],
    ) -> bool:
        """Copy the rows into the buffers unless they are there. False: a row has too many unread tokens."""
        if weights != buffers.known_weights:
            buffers.upload(buffers.weights, weights)
            buffers.known_weights, buffers.ahead = weights, None
        if buffers.holds(requests, lengths, read):
            return True
        if buffers.config is None:
            buffers.upload(buffers.tree.tokens, [request.tokens[-1:] for request in requests])
        elif not self._load_unread(buffers, requests, forwards, read):
            return False
        marks = [request.params.within or (-1, -1) for request in requests]
        for buffer, values in (
            (buffers.lengths, lengths), (buffers.seeds, [request.params.seed for request in requests]),
            (buffers.temperatures, [request.params.temperature for request in requests]),
            (buffers.threshold, [request.params.rule.threshold for request in requests]),
            (buffers.opening, [opening for opening, _ in marks]), (buffers.closing, [closing for _, closing in marks]),
        ):
            buffers.upload(buffer, values)
        buffers.owners, buffers.known = [weakref.ref(request) for request in requests], (lengths, read)
        buffers.ahead = None
        return True

    def _load_unread(
        self, buffers: Buffers, requests: Sequence[Request], forwards: Forwards, read: list[int]
    ) -> bool:
        """Copy what the drafter has not processed. False: a row has too many such tokens."""
        unread = [forwards.unread(number, request) for number, request in enumerate(requests)]
        fed = buffers.path_for(max(map(len, unread)))
        if fed is None:
            return False
        if buffers.reads_features:
            buffers.fed_features.zero_()  # a NaN of an earlier request would reach the cache, and no mask would hide it
            for row, tokens in enumerate(unread):
                buffers.fed_features[row, : len(tokens)].copy_(forwards.features(row))
        most = buffers.fed_tokens.shape[1]
        buffers.upload(buffers.draft_lengths, read)
        buffers.upload(buffers.counts, list(map(len, unread)))
        buffers.upload(buffers.fed_tokens, [[*tokens, *[0] * (most - len(tokens))] for tokens in unread])
        buffers.fed = fed
        return True

    def _draft(
        self, home: Home, buffers: Buffers, settings: Settings, requests: Sequence[Request], read: Sequence[int]
    ) -> bool:
        """Launch a draft after rows with these numbers of positions in the drafter's cache. False: it is too small."""
        bucket = buffers.draft_bucket(read)
        if bucket is None:
            return False
        processors = requests[0].params.processors
        home.pool.run(
            ("draft", buffers.key, settings.draft, bucket, buffers.fed),
            partial(draft, buffers, self.target, self.drafter, settings.draft, processors, bucket, buffers.fed))
        buffers.ahead = settings.draft
        return True

    def _finish(
        self, buffers: Buffers, forwards: Forwards, lengths: list[int], read: list[int],
        table: Sequence[Sequence[Sequence[float]]], origins: Sequence[Sequence[str | None]],
    ) -> list[Walked]:
        """Read the table [R, P, 9], and set the lengths of the caches."""
        walks = steps_of([[step[:5] for step in row] for row in table], [[step[5:] for step in row] for row in table])
        ends = [length + len(steps) for length, steps in zip(lengths, walks, strict=True)]
        forwards.cache.lengths = ends
        drafted = [length + buffers.lead for length in lengths] if read else []
        if forwards.draft_cache is not None:
            forwards.draft_cache.lengths = drafted
        if buffers.reads_features:  # the next cycle overwrites those in the buffer
            features = buffers.fed_features[:, : max(map(len, walks))].clone()
            forwards.unread_features = [[features[row, : len(steps)]] for row, steps in enumerate(walks)]
        buffers.known = ends, drafted
        return [Walked(*walked, buffers.config.depth if read else 0) for walked in zip(walks, origins, strict=True)]


def obstacle(request: Request, rule: Rule, drafting: bool) -> str | None:
    """What keeps every cycle of a request from being captured, as an option; None: nothing does.

    Args:
        rule: of the cycle. drafting: whether other rows have drafts.
    """
    params = request.params
    if params.top_logprobs:
        return "top_logprobs"
    if drafting and not params.speculative:
        return "speculative=False beside requests with drafts"
    own = (type(processor).__name__ for processor in params.processors if type(processor) not in CAPTURABLE)
    return next(own, None if type(rule) in RULES.values() else f"the rule {type(rule).__name__}")


@functools.cache
def log_uncaptured(what: str) -> None:
    log.warning("cycles are not captured as CUDA graphs, and take up to twice as long, for %s", what)


def settings_of(requests: Sequence[Request], rules: Sequence[Rule], plan: Plan) -> Settings | None:
    """The settings of a cycle's programs; None: it cannot be captured, or its rows need different programs."""
    first, params = requests[0].params, [request.params for request in requests]
    drafting = plan.tree is not None
    if plan.decided_by_scores or any(obstacle(*row, drafting) for row in zip(requests, rules, strict=True)):
        return None
    if not share_processors(requests) or any(row.greedy != first.greedy for row in params):
        return log_uncaptured("requests of different temperature, top_k, top_p or min_p in one batch")
    own = {EXACT if rule == EXACT else with_some_threshold(rule) for rule in rules}
    rule = next((rule for rule in own if rule != EXACT), EXACT)
    if own - {rule, EXACT}:
        return log_uncaptured("requests of different fuzzy rules in one batch")
    if plan.tree is None:  # no rule can choose
        own, rule = {EXACT}, EXACT
    weights = [row.noise_weight(rule) if plan.tree else 0.0 for row, rule in zip(params, rules, strict=True)]
    if any(weights) and not all(weights):
        return None
    key = tuple((type(processor), *vars(processor).items()) for processor in first.processors)
    fuzzy = [row for row in params if rule != EXACT]
    walk = WalkSettings(rule, first.greedy, key, any(row.budget is not None for row in fuzzy),
                        len(own) > 1 or any(row.within is not None for row in fuzzy), joined=False)
    coupled = any(weights)
    drafted = DraftSettings(coupled, not rule.is_lossless(first.greedy), key if coupled else ())
    copying = plan.tree is not None and any(request.copying for request in requests)
    return Settings(plan.tree, copying, drafted, walk, weights)


def with_some_threshold(rule: Rule) -> Rule:
    """The rule of a program, which reads the thresholds of the rows. See `Rule.is_lossless`."""
    return replace(rule, threshold=min(0.5, rule.threshold_limit[0] / 2))


def storages_of(forwards: Forwards) -> list[Tensor]:  # [layers, 2, B, H, C, D]
    """The storage of the target's and of the drafter's cache."""
    target, drafter = forwards.target, forwards.drafter
    models = [(target, target.fused.layers[0])]
    if drafter is not None:
        models.append((drafter, drafter.fused[0] if isinstance(drafter, DraftHead) else drafter.fused.layers[0]))
    return [cache.storage(layer.key_heads, layer.size, torch.empty(0, dtype=model.dtype, device=model.device))
            for cache, (model, layer) in zip(forwards.caches, models, strict=True)]


def capacity_of(room: int) -> int:
    """The capacity of new caches, so that they serve later requests too."""
    return max(BUCKET, 1 << (room - 1).bit_length()) if room <= LARGE else -(-room // LARGE) * LARGE

"""Fuzzy acceptance in vLLM: a plug-in (entry point `vllm.general_plugins`), active if EAGLE_FSD_VLLM=1.

vLLM verifies chains of draft tokens, all requests in one batch. If a request's `vllm_xargs` set a threshold, our rules
walk its chain, and their tokens replace its row of the rejection sampler's output. Every other row stays vLLM's own.

F fuzzy rows, K the longest of their chains, N = K + 1 nodes, V vocabulary; M draft tokens of the whole batch.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import accumulate

import torch
from torch import Tensor

from ..acceptance import Rule, make_rule
from ..acceptance.walk import Step, walk
from ..drafting.noise import gumbel_noise
from ..drafting.tree import DraftTree
from ..utils.checks import is_check

log = logging.getLogger("vllm.eagle_fsd")  # below vLLM's own logger, which has the handler

SWITCH, PREFIX = "EAGLE_FSD_VLLM", "eagle_fsd_"
TESTED = ("0.32.0",)
WITH_DISTRIBUTION = ("eagle", "eagle3")  # methods whose draft logits this plug-in can record
LOG_SECONDS = 10  # as in vLLM's own statistics


def read_rule(extra: Mapping[str, object] | None) -> Rule | None:
    """The acceptance rule in a request's extra arguments; None if there is none.

    Raises:
        ValueError, TypeError: an unknown rule or option, a value out of range, or no threshold.
    """
    options = {name[len(PREFIX):]: value for name, value in (extra or {}).items() if name.startswith(PREFIX)}
    if not options:
        return None
    if "threshold" not in options:
        raise ValueError(f"{', '.join(map(PREFIX.__add__, options))} without {PREFIX}threshold, which has no default")
    return make_rule(options.pop("rule", "fsd"), **options)


def check_request(params: object, speculative: object | None, on_cpu: bool) -> None:
    """Refuse a request that the server cannot decode.

    Args:
        params: vLLM's `SamplingParams`.
        speculative: vLLM's `SpeculativeConfig`; None: the server does not draft.

    Raises:
        ValueError, TypeError: see `read_rule`; or the server's drafts do not fit the rule.
    """
    rule = read_rule(params.extra_args)
    if rule is None:
        return
    if speculative is None:
        raise ValueError(f"{PREFIX}threshold needs drafts: start the server with --speculative-config")
    if speculative.method not in WITH_DISTRIBUTION and hasattr(rule, "divergence"):
        raise ValueError(f"rule {rule.name!r} needs the draft's distribution, which method {speculative.method!r} does "
                         f"not provide; methods that do: {', '.join(WITH_DISTRIBUTION)}")
    if speculative.draft_sample_method != "greedy" or speculative.rejection_sample_method != "standard":
        raise ValueError(f"{PREFIX}threshold needs draft_sample_method greedy and rejection_sample_method standard, "
                         f"not {speculative.draft_sample_method!r}, {speculative.rejection_sample_method!r}")
    if on_cpu and not is_greedy(params) and not rule.is_lossless(False):
        # vLLM's _expand_kernel_impl writes to a copy there.
        raise ValueError(f"on CPUs vLLM {TESTED[-1]} ignores the temperature of drafted tokens: {PREFIX}threshold "
                         f"needs temperature 0 there, got {params.temperature}")


@dataclass
class VerifiedChains:
    """Verified chains in the form of `acceptance.walk.Verified`."""

    tree: DraftTree
    draft_logits: Sequence[Tensor]
    raw: Tensor  # [F, N, V] float32, the target's logits
    warped: Tensor  # [F, N, V] float32, after all processors
    seeds: Tensor | None  # [F] int64, seeds of the noise; None: greedy
    draft_tokens: Tensor | None = None
    errors: dict[int, Exception] = field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        return self.seeds is None

    def warp(self, raw: Tensor, node: Tensor, path: Sequence[Tensor], going: Tensor) -> Tensor:
        return self.warped[torch.arange(len(node), device=node.device), node]

    def noise(self, depth: int) -> Tensor | None:
        if self.greedy:
            return None
        depths = torch.full_like(self.seeds, depth)[:, None]
        return gumbel_noise(self.seeds, depths, self.raw.shape[-1])[:, 0]


def walk_chains(
    rule: Rule,
    raw: Tensor,  # [F, N, V] float32, the target's logits
    warped: Tensor,  # [F, N, V] float32, after all processors
    tokens: Tensor,  # [F, K] long, draft tokens; -1: the chain has ended
    draft: Tensor | None,  # [F, K, V] the draft's raw logits
    known: Tensor,  # [F] bool, rows with draft logits
    seeds: Tensor | None,  # [F] int64, seeds of the noise; None: greedy
) -> list[list[Step]]:
    """The steps of `acceptance.walk` for each row, on a tree with one branch."""
    rows, length = tokens.shape
    device, column = tokens.device, torch.arange(length + 1, device=tokens.device)
    drafted = (tokens >= 0).long().cumprod(1)
    root = torch.zeros_like(drafted[:, :1])
    tree = DraftTree(
        tokens=torch.cat([root, tokens.clamp_min(0)], 1), parents=(column - 1).clamp_min(0).expand(rows, -1),
        depths=torch.cat([root, drafted], 1) * column, draft_rows=(known.long() - 1)[:, None].expand(rows, length + 1),
        ancestors=(column[:, None] >= column).expand(rows, -1, -1), scores=-column.float().expand(rows, -1),
        max_depth=length)

    levels = () if draft is None else draft.split(1, dim=1)
    threshold = torch.full((rows,), rule.threshold, dtype=torch.float64, device=device)
    return walk(rule, VerifiedChains(tree, levels, raw, warped, seeds), threshold)


class FuzzyRows:
    """State of one worker process between vLLM's calls: draft logits, and the rows to replace."""

    def __init__(self) -> None:
        self.recorded: list[Tensor] | None = None  # draft logits, [batch, V] per step; None: no rule needs them
        self.draft: tuple[dict[str, int], Tensor] | None = None  # last draft: row by request id, logits [batch, K, V]
        self.verifying: tuple[dict[int, Rule], Sequence, Tensor] | None = None  # rules by row, states, all logits
        self.generator: torch.Generator | None = None
        self.counts, self.logged = [0, 0, 0, 0], time.monotonic()

    @staticmethod
    def rules(states: Sequence) -> dict[int, Rule]:
        """The rules of requests that are not lossless, by row."""
        params = dict(enumerate(state.sampling_params for state in states))
        rules = {row: read_rule(own.extra_args) for row, own in params.items() if own is not None}  # None: pooling
        return {row: rule for row, rule in rules.items() if rule and not rule.is_lossless(is_greedy(params[row]))}

    def replace(
        self,
        output: Tensor,  # [batch, max_spec_len + 1] int32, padded with -1
        drafted: Sequence[int],  # [batch] lengths of the chains
        draft_tokens: Tensor,  # [M]
        processed: Tensor,  # [M, V] float32
        bonus: Tensor,  # [batch, 1], the token after a fully accepted chain
        generators: Mapping[int, torch.Generator],
    ) -> None:
        """Replace the fuzzy rows of the rejection sampler's output."""
        rules, states, logits = self.verifying
        groups: dict[tuple[Rule, bool], list[int]] = {}
        for row, rule in rules.items():
            if drafted[row]:
                groups.setdefault((rule, is_greedy(states[row].sampling_params)), []).append(row)
        starts = list(accumulate(drafted, initial=0))
        for (rule, greedy), rows in groups.items():
            ends = torch.tensor([drafted[row] for row in rows])  # index of the node after the chain
            first, node = torch.tensor([starts[row] for row in rows]), torch.arange(int(ends.max()) + 1)
            at = (first[:, None] + torch.minimum(node, ends[:, None] - 1)).to(output.device)  # [F, N], indices into M
            warped = processed[at]
            past, after = (node >= ends[:, None]).nonzero().T.to(output.device)
            warped[past, after] = -math.inf
            warped[past, after, bonus[rows, 0].long()[past]] = 0.0  # vLLM has drawn it already
            at_logits = first[:, None] + torch.tensor(rows)[:, None] + torch.minimum(node, ends[:, None])
            raw = logits[at_logits.to(output.device)].float()
            tokens = draft_tokens[at[:, :-1]].long().masked_fill((node[:-1] >= ends[:, None]).to(output.device), -1)
            row_of, draft = self.draft or ({}, None)
            known = torch.tensor([states[row].req_id in row_of for row in rows])
            if draft is not None:
                draft = draft[[row_of.get(states[row].req_id, 0) for row in rows], : len(node) - 1]
            seeds = None if greedy else torch.cat([self._seed(generators.get(row), output.device) for row in rows])
            steps = walk_chains(rule, raw, warped, tokens, draft, known.to(output.device), seeds)
            accepted = [[step.token for step in path] + [-1] * (output.shape[1] - len(path)) for path in steps]
            output[rows] = torch.tensor(accepted, dtype=output.dtype).to(output.device)
            fuzzy = sum(not step.is_exact for path in steps for step in path)
            self._count(len(rows), int(ends.sum()), sum(map(len, steps)) - len(rows), fuzzy)

    def _seed(self, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """A seed, [1] int64, from the request's generator if it has one, else from one that vLLM does not use."""
        if generator is not None:
            return torch.randint(2**62, (1,), generator=generator, device=generator.device).to(device)
        if self.generator is None:  # the same in all workers of one model
            self.generator = torch.Generator().manual_seed(torch.initial_seed())
        return torch.randint(2**62, (1,), generator=self.generator).to(device)

    def _count(self, *numbers: int) -> None:
        self.counts = [old + new for old, new in zip(self.counts, numbers, strict=True)]
        if time.monotonic() - self.logged > LOG_SECONDS:
            log.info("eagle_fsd: %d drafts with a threshold, %d tokens drafted, %d accepted, %d fuzzy", *self.counts)
            self.logged = time.monotonic()


def is_greedy(params: object) -> bool:
    """Whether vLLM decodes the request greedily."""
    return params.temperature < 1e-5  # vLLM's _SAMPLING_EPS


def register() -> None:
    """The entry point; vLLM calls it in every process.

    Raises:
        RuntimeError: the plug-in is on, and vLLM has an untested version or uses its second model runner.
    """
    if os.environ.get(SWITCH) != "1":
        return
    import vllm

    version = vllm.__version__.partition("+")[0]
    if version not in TESTED:
        raise RuntimeError(f"{SWITCH}=1, but eagle_fsd is not tested with vLLM {version}: install "
                           f"{' or '.join(TESTED)}, or unset {SWITCH}")
    if os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0") != "0":
        raise RuntimeError(f"{SWITCH}=1 needs vLLM's first model runner: set VLLM_USE_V2_MODEL_RUNNER=0, "
                           f"or unset {SWITCH}")
    copied = os.environ.get("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "")  # variables for workers that Ray starts
    os.environ["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"] = ",".join({*filter(None, copied.split(",")), SWITCH})
    from vllm.exceptions import VLLMValidationError
    from vllm.platforms import current_platform
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    rows = FuzzyRows()

    def validate(original, params, speculative) -> None:
        original(params, speculative)
        try:
            check_request(params, speculative, current_platform.is_cpu())
        except (ValueError, TypeError) as error:
            if not is_check(error):
                raise
            raise VLLMValidationError(str(error)) from error

    def propose(original, runner, *args, **kwargs):
        rows.draft, requests = None, list(runner.input_batch.req_ids)
        rules = rows.rules([runner.requests[request] for request in requests])
        rows.recorded = [] if any(hasattr(rule, "divergence") for rule in rules.values()) else None
        tokens = original(runner, *args, **kwargs)
        if rows.recorded:
            rows.draft = {request: row for row, request in enumerate(requests)}, torch.stack(rows.recorded, 1)
        rows.recorded = None
        return tokens

    def draft_greedily(original, proposer, hidden):
        if rows.recorded is None:
            return original(proposer, hidden)
        rows.recorded.append(proposer.model.compute_logits(hidden))
        return rows.recorded[-1].argmax(-1)

    def sample(original, runner, logits, metadata):
        states = [runner.requests[request] for request in runner.input_batch.req_ids]
        rules = {} if metadata is None else rows.rules(states)
        rows.verifying = (rules, states, logits) if rules else None
        try:
            return original(runner, logits, metadata)
        finally:
            rows.verifying = None

    def reject(original, draft_tokens, drafted, longest, ends, probs, processed, bonus, metadata, **options):
        output = original(draft_tokens, drafted, longest, ends, probs, processed, bonus, metadata, **options)
        if rows.verifying is not None:
            rows.replace(output, drafted, draft_tokens, processed, bonus, metadata.generators)
        return output

    wrap(SamplingParams, "_validate_spec_decode", validate)
    wrap(GPUModelRunner, "propose_draft_token_ids", propose)
    wrap(SpecDecodeBaseProposer, "_greedy_sample", draft_greedily)
    wrap(GPUModelRunner, "_sample", sample)
    wrap(rejection_sampler, "rejection_sample", reject)
    log.info("eagle_fsd: vllm_xargs accept %sthreshold and %srule", PREFIX, PREFIX)


def wrap(owner: object, name: str, function: Callable) -> None:
    """Replace a function or method by `function`, which receives the original as its first argument."""
    original = getattr(owner, name)
    setattr(owner, name, wraps(original)(lambda *args, **kwargs: function(original, *args, **kwargs)))

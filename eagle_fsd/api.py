"""`generate`: one call from prompt to answer."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation.streamers import BaseStreamer

from .acceptance import Rule, make_rule
from .engine.decoder import Session
from .engine.loop import run
from .engine.receipts import Output
from .engine.request import Settings
from .engine.sampling import build_processors, check_functions
from .models.parallel import of_first
from .pair import EagleModel, bundled_pair
from .prompts import check_length, decode, encode_prompts, end_tokens
from .settings import (
    agreed_criteria,
    check_budget,
    check_seeds,
    check_stop_ids,
    check_stop_strings,
    ends_streamer,
    resolve_rule,
    resolve_tree,
)
from .trees.config import TreeConfig

log = logging.getLogger(__name__)


@ends_streamer
def generate(
    prompt: str | list | Tensor,
    model: EagleModel | None = None,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    min_new_tokens: int = 0,
    ignore_eos: bool = False,
    seed: int | Sequence[int] | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    acceptance: str | Rule | Callable = "fsd",
    threshold: float | None = None,
    divergence: str | None = None,
    quality: str | None = None,
    budget: float | None = None,
    tree: TreeConfig | None = None,
    logits_processor: Sequence[LogitsProcessor] | None = None,
    stopping_criteria: Sequence | None = None,
    streamer: BaseStreamer | None = None,
    session: Session | None = None,
) -> Output:
    """Generate an answer with EAGLE-2 draft trees and fuzzy acceptance.

    Args:
        prompt: text (tokenised as it is), a chat (list of {"role", "content"}, put through the tokenizer's chat
            template), or token ids (list of int, or tensor [L] or [1, L]). A list of such prompts is a batch: they are
            decoded together, each as it would be alone (docs/batches.md).
        model: from `load`; None: the bundled demo pair.
        max_new_tokens: never exceeded; lowered where the target has fewer positions left.
        temperature: 0 is greedy; otherwise sampling, with top_p, top_k (0: off) and min_p (0: off).
        repetition_penalty, min_new_tokens: as in `model.generate`.
        ignore_eos: go on past end tokens.
        seed: of the sampling noise; None draws one, reported in `out.seed`. With one seed, plain decoding, `exact`
            and any rule at its lossless end give the same tokens. For a batch a list of seeds, one for each prompt; one
            seed is that of the first prompt, and those after it get the numbers that follow.
        stop: strings that end the answer; not part of `out.text`.
        stop_token_ids: further tokens that end it.
        acceptance: a rule's name (exact, fsd, fsd_paper, tilt, typical, lenience, relaxed), a rule object, or a
            function from a `Verification` to log-weights [B, N, V].
        threshold: the rule's dial. None: for fsd the value of the strictest promise about accuracy that the head is
            calibrated for at this target, dtype, temperature and tree, where nothing else shapes the distribution
            (top_p, top_k, min_p, repetition_penalty, logits_processor); else 0 (lossless for fsd, tilt and lenience).
        divergence: for the rules that gate on one, default js: kl, reverse_kl, js, tv, js_fsd_code, or a form on the
            target's top k tokens such as js_top32.
        quality: a promise that the head is calibrated for (`eagle-fsd calibrate`), such as "accuracy_drop<=1%"; it
            chooses rule and threshold.
        budget: nats that fuzzy acceptance may cost in this answer: summed KL to the target when sampling, summed
            log-probability regret when greedy (see `eagle_fsd.budget`). When it is spent, or when the text starts to
            repeat, decoding is exact for the rest; `out.stats` says where. 0: exact; inf: only repetition counts.
        tree: size of the draft tree; None: as the model was loaded for (`load(tree=)`).
        logits_processor, stopping_criteria, streamer: those of `transformers`. Processors see each node's own path and
            must be functions of it and the scores (docs/processors.md). A streamer with a method
            `on_receipts(receipts)` gets the receipts of each cycle before its tokens, and every streamer is ended also
            where this call raises. Stop strings are streamed like all other text.
        session: a `Session` that several calls share: what the caches hold of the prompt since the last call is not
            processed again. `Chat` is made of it.

    Returns:
        `Output` with text, token_ids, finish_reason, seed, stats and receipts; for a batch, a list of them.

    Raises:
        ValueError, TypeError: a bad option, or a prompt that is empty, too long or of no accepted form, before any
            forward; while decoding, a rule, processor or criterion that returns something else than it must, or
            processors that leave no token to draw.

    What a rule, processor, criterion or streamer raises itself is passed on. No error changes the model: the next call
    gives what it would have given without.
    """
    model = bundled_pair() if model is None else model
    if not isinstance(model, EagleModel):
        raise TypeError(f"model must come from eagle_fsd.load, got {type(model).__name__}")
    prompts, batched = encode_prompts(prompt, model)
    rooms = [check_length(len(ids), max_new_tokens, model) for ids in prompts]
    eos_ids = end_tokens(model)
    processors = [build_processors(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        min_new_tokens=min_new_tokens, prompt_length=len(ids), eos_ids=sorted(eos_ids), custom=logits_processor,
        device=model.target.device,
    ) for ids in prompts]
    shaped = bool(top_k or top_p < 1 or min_p or repetition_penalty != 1 or logits_processor)
    if quality is None:
        rule = resolve_rule(acceptance, threshold, divergence, model, temperature=temperature, tree=tree, shaped=shaped)
    elif acceptance != "fsd" or threshold is not None or divergence is not None:
        raise ValueError(f"quality={quality!r} chooses the rule: leave acceptance, threshold and divergence out")
    else:
        rule = make_rule(**model.calibrated(quality, temperature, tree).options)
        if shaped:
            log.warning("%s was calibrated without top_k, top_p, min_p, repetition_penalty and processors of your own: "
                        "it may not hold", quality)
    seeds = of_first(model.target.group, lambda: check_seeds(seed, len(prompts)))
    if not isinstance(ignore_eos, bool):
        raise TypeError(f"ignore_eos must be a bool, got {ignore_eos!r}")
    check_functions("stopping_criteria", stopping_criteria)
    stops = check_stop_strings(stop, model)
    if session is not None and not isinstance(session, Session):
        raise TypeError(f"session must be a Session or None, got {session!r}")
    if len(prompts) > 1 and (session is not None or streamer is not None):
        name = "a session" if session is not None else "a streamer"
        raise ValueError(f"{name} serves one prompt at a time, got a batch of {len(prompts)}")
    shared = {
        "rule": rule,
        "greedy": temperature == 0,
        "eos_ids": frozenset() if ignore_eos else eos_ids,
        "stop_ids": check_stop_ids(stop_token_ids, model),
        "criteria": agreed_criteria(stopping_criteria or [], model),
        "budget": check_budget(budget, rule, greedy=temperature == 0),
    }
    together = [(numbers, resolve_tree(tree, rule, temperature, model, len(numbers)))
                for numbers in model.target.batches([len(ids) for ids in prompts])]
    of_rows = functools.partial(resolve_tree, tree, rule, temperature, model)
    if streamer is not None:
        streamer.put(torch.tensor(prompts))
    outputs: list[Output] = [None] * len(prompts)
    for numbers, choice in together:
        choose = of_rows if tree is None and len(numbers) > 1 else None
        settings = [Settings(
            **shared, tree=choice.tree, cost=choice.cost, processors=processors[number], seed=seeds[number],
            max_new_tokens=rooms[number], choose=choose,
            # Texts of a fuzzy rule depend on where drafting pauses, and must not depend on earlier requests.
            pause=model.pauses[temperature] if rule.is_lossless(temperature == 0) else None,
        ) for number in numbers]
        later = [] if choose is None else [choose(count).tree for count in range(1, len(numbers))]
        drafting = any([choice.tree, *later]) or session is not None  # as rows end, or in a later call
        answers = run(
            model.target, model.draft if drafting else None, [prompts[number] for number in numbers], settings,
            streamer=streamer, session=session, graphs=model.graphs,
            stop_check=(lambda new: any(s in decode(model, new) for s in stops)) if stops else None,
        )
        for number, output in zip(numbers, answers, strict=True):
            if choice.tree is None and output.stats.undrafted == output.stats.target_forwards:
                output.stats.plain_because = "no tree is expected to be faster than plain decoding"
            if model.tokenizer is not None:
                output.text = decode(model, output.token_ids)
                found = [at for s in stops if (at := output.text.find(s)) >= 0]
                output.text = output.text[: min(found)] if found else output.text
            outputs[number] = output
    return outputs if batched else outputs[0]

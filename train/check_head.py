"""Say why a draft head is weak: what of a dataset its target wrote, and what the head makes of it.

    python -m train.check_head --target T --draft HEAD --data data/own

D hidden size, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from eagle_fsd.checks import require_integer
from eagle_fsd.cli.arguments import parse_options
from eagle_fsd.cli.exits import exit_status
from eagle_fsd.data.gguf import target_source
from eagle_fsd.data.progress import Progress
from eagle_fsd.heads.catalogue import default_target
from eagle_fsd.heads.checkpoint import load_head
from eagle_fsd.heads.eagle import DraftHead
from eagle_fsd.heads.eagle3 import Eagle3Head
from eagle_fsd.models.loading import load_target
from eagle_fsd.models.target import TargetModel
from eagle_fsd.pair import EagleModel
from train.documents import Documents
from train.encoding import ANYTHING, render
from train.objectives import AlignedLoss, Objective

STEPS = 5  # places of a chain of drafts; from the second on the head reads its own predictions
FOREIGN = 1.3  # times the entropy: what the target says itself, sampled, has 1.0, and its greedy answers less
GOOD = (0.68, 0.59, 0.54, 0.53, 0.52)  # SmolLM2's bundled head on 24 held-out documents of its own data
COVERED = 0.95  # share of learned tokens that a head should name
HARDLY = 0.1  # share of tokens; who agrees less often shows nothing but that
SHIFTED = 0.01  # share of tokens that an agreement has to be higher by
# Regression makes predicted features shorter than the true ones, by their cosine: to 0.4 of them after some steps, to
# 0.9 after many; never longer.
TOO_LONG = 1.4
RISING = 0.05  # by which the last place may agree more than the first, which reads the target's features


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Say why a draft head is weak.

    Args:
        target: directory, hub id or GGUF file; without it SmolLM2-135M-Instruct, as of eagle_fsd.load.
        draft: directory or hub id of the head.
        data: dataset of train.prepare_data, held out if there is one.
        documents: how many of it are read, the last ones.
        trust_remote_code: allow a target to run code from its repository.
    """

    target: str | None = None
    draft: str
    data: Path
    documents: int = 32
    trust_remote_code: bool = False


@dataclass
class Findings:
    """Sums over learned tokens."""

    tokens: int = 0
    own: int = 0  # the target's most likely
    surprise: float = 0.0  # -log p of them, nats
    entropy: float = 0.0  # of p, nats
    likeliest: float = 0.0  # probability of the most likely token: what `own` is in text that the target has sampled
    covered: int = 0  # that the head can name
    agreed: Tensor | None = None  # [STEPS] the head's best token is the target's
    # [3] the same at tokens with another learned one after them: as it is used; where it reads each token beside the
    # feature of its own position; and, so, for the token after.
    shifted: Tensor | None = None
    followed: int = 0  # how many those are
    lengths: float = 0.0  # of predicted features over true ones
    documents: int = 0
    headed: int = 0  # of which show the target's chat template


@torch.no_grad()
def examine(
    head: DraftHead, target: TargetModel, documents: Documents, chosen: Sequence[int], header: Sequence[int]
) -> Findings:
    """What a head makes of the answers in a dataset, and what the target does.

    Args:
        chosen: documents to read. header: tokens that stand before each answer.
    """
    found, loss = Findings(), AlignedLoss(head, Objective(soft_ce=1.0, aligned_steps=STEPS), target.logits)
    for index in Progress(chosen, desc="documents", unit="document"):
        tokens, learned = (torch.from_numpy(array).to(target.device)
                           for array in documents.collate(np.asarray([index])))  # [1, T]
        found.documents += 1
        text = tokens[0].tolist()
        found.headed += any(text[at : at + len(header)] == list(header) for at in range(len(text)))
        learned[:, :2] = False  # two tokens have to precede
        at = learned[0].nonzero().flatten()  # [M]
        if not len(at):
            continue
        features = target.features(tokens, use_cache=False)  # [1, T, F]
        log_p = target.logits(features[0, at - 1]).float().log_softmax(-1)  # [M, V]
        best = log_p.argmax(-1)
        found.tokens += len(at)
        found.own += int((best == tokens[0, at]).sum())
        found.surprise -= float(log_p.gather(1, tokens[0, at, None]).sum())
        found.entropy -= float((log_p.exp() * log_p).sum())
        found.likeliest += float(log_p.amax(-1).exp().sum())
        found.covered += int(head.names(tokens[0, at]).sum())
        agreed = loss(features, tokens, learned)[1]
        found.agreed = agreed if found.agreed is None else found.agreed + agreed
        inner = at[learned[0].roll(-1)[at]]
        after, counted = target.logits(features[0, inner]).argmax(-1), torch.isin(at, inner)
        shifted = torch.zeros(3)
        for shift in (0, 1):  # as it is used, and each token beside the feature of its own position
            inputs, following = head.read(features[:, shift : shift - 2 or None]), tokens[:, 1:-1]
            positions = torch.arange(following.shape[1], device=at.device)[None]
            predicted = head(inputs, following, positions)[0, at - 2]  # [M, D]
            token = head.named(head.own_logits(predicted, target.logits).argmax(-1))
            shifted[shift] = (token == best)[counted].sum()
            if shift:
                shifted[2] = (token[counted] == after).sum()
            elif not isinstance(head, Eagle3Head):
                found.lengths += float((predicted.norm(dim=-1) / features[0, at - 1].norm(dim=-1)).sum())
        found.shifted = shifted if found.shifted is None else found.shifted + shifted
        found.followed += len(inner)
    return found


def verdicts(found: Findings, eagle3: bool) -> list[str]:
    """What is wrong, in words; nothing where all is as the recipe has it."""
    count, agreed = found.tokens, (found.agreed / found.tokens).tolist()
    said = []
    if found.headed < found.documents:
        said.append(f"{found.documents - found.headed} of {found.documents} documents do not show the target's chat "
                    "template: prepare them with this target, or it is plain text")
    # A few end marks of answers that were cut off are a great surprise too, and no more than that.
    if found.surprise > FOREIGN * found.entropy and found.own < found.likeliest:
        said.append(f"the target did not write these answers (it gives their tokens {found.surprise / count:.2f} nats, "
                    f"its own sampled text has {found.entropy / count:.2f}; {found.own / count:.0%} are its most "
                    f"likely ones, there {found.likeliest / count:.0%}): train on its own (--regenerate)")
    as_used, own, following = (found.shifted / max(1, found.followed)).tolist()
    if agreed[0] < HARDLY:
        said.append(f"it hardly ever agrees ({agreed[0]:.1%}): made for another target or other layers of it, damaged, "
                    "or hardly trained")
    elif max(own, following) > as_used + SHIFTED:
        said.append("it is off by one: it agrees more where it reads each token beside the feature of its own position "
                    f"({max(own, following):.2f}, as it is used {as_used:.2f})")
    elif not eagle3 and found.lengths / count > TOO_LONG:
        said.append(f"its features are {found.lengths / count:.2f} times as long as the target's: another norm or "
                    "layer than it was trained with")
    elif agreed[-1] > agreed[0] + RISING:
        said.append(f"it agrees more where it reads its own predictions ({agreed[-1]:.2f}) than where it reads the "
                    f"target's features ({agreed[0]:.2f}): another norm or layer than it was trained with")
    if found.covered / count < COVERED:
        said.append(f"it can name {found.covered / count:.1%} of the tokens: give it a larger draft vocabulary")
    low = [place + 1 for place, (mine, good) in enumerate(zip(agreed, GOOD, strict=True)) if mine < 0.9 * good]
    if low and not said:
        said.append(f"it agrees less than SmolLM2's bundled head at places {low}: " + (
            "too little training, which takes more own text and more passes" if low[0] == 1
            else "more passes, then aligned steps (--objective hass)"))
    return said


def run(arguments: Arguments) -> None:
    """Print what was found.

    Raises:
        ValueError: parts that do not fit together, or a dataset without a learned token.
    """
    require_integer("documents", arguments.documents, 1)
    documents = Documents.load(arguments.data)
    place, trusted = target_source(arguments.target or default_target()), arguments.trust_remote_code
    tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trusted)
    head = load_head(arguments.draft).eval().float()
    model, _ = load_target(place, dtype="float32", trust_remote_code=trusted)
    pair = EagleModel.from_parts(model, head)
    chosen = range(len(documents))[-arguments.documents :]
    question = [{"role": "user", "content": ANYTHING}]
    header = tokenizer(render(tokenizer, question, True).rpartition(ANYTHING)[2], add_special_tokens=False)["input_ids"]
    found = examine(pair.draft, pair.target, documents, chosen, header)
    if not found.tokens:
        raise ValueError(f"{arguments.data} has no learned token in its last {arguments.documents} documents")
    count = found.tokens
    for name, value in {
        "learned tokens": f"{count} in {found.documents} documents",
        "the target's most likely": f"{found.own / count:.1%}",
        "surprise of the target": f"{found.surprise / count:.2f} nats a token; entropy {found.entropy / count:.2f}",
        "named by the head": f"{found.covered / count:.1%}",
        "agrees at place 1 to 5": " ".join(f"{each / count:.2f}" for each in found.agreed.tolist())
        + f" (the bundled head of SmolLM2 {' '.join(f'{each:.2f}' for each in GOOD)})",
    }.items():
        print(f"{name + ':':<28}{value}")
    for verdict in verdicts(found, isinstance(head, Eagle3Head)) or ["nothing is wrong that can be seen here"]:
        print(f"- {verdict}")


def main(words: Sequence[str] | None = None) -> int:
    return exit_status(
        "train.check_head", lambda: run(parse_options(Arguments, words, program="python -m train.check_head")))


if __name__ == "__main__":
    sys.exit(main())

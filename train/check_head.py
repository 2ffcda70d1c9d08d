"""Diagnose a weak draft head: whether the target wrote a dataset, and how well the head predicts it.

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

STEPS = 5  # positions in a chain of drafts; from the second on the head reads its own predictions
FOREIGN = 1.3  # cross-entropy over entropy: 1.0 for text that the target sampled, less for its greedy answers
GOOD = (0.68, 0.59, 0.54, 0.53, 0.52)  # agreement of SmolLM2's bundled head on 24 held-out documents
COVERED = 0.95  # least share of learned tokens in a good draft vocabulary
HARDLY = 0.1  # an agreement below this share allows no other verdict
SHIFTED = 0.01  # least gain in agreement that shows an off-by-one error
# Regression makes predicted features shorter than the true ones, by their cosine: 0.4 times as long after a few steps,
# 0.9 times after many. They are never longer.
TOO_LONG = 1.4
RISING = 0.05  # most by which agreement may rise from the first position to the last


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Diagnose a weak draft head.

    Args:
        target: directory, Hub ID or GGUF file of the target. If omitted: SmolLM2-135M-Instruct, as in eagle_fsd.load.
        draft: directory or Hub ID of the head.
        data: dataset from train.prepare_data, preferably one that the head did not learn.
        documents: number of documents to read, from the dataset's end.
        trust_remote_code: run code from the target's repository.
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
    own: int = 0  # tokens that are the target's most likely
    surprise: float = 0.0  # -log p of the tokens, nats
    entropy: float = 0.0  # entropy of p, nats
    likeliest: float = 0.0  # max p: the expected value of `own` in text that the target has sampled
    covered: int = 0  # tokens in the draft vocabulary
    agreed: Tensor | None = None  # [STEPS] positions where the head's best token is the target's
    # [3] the same where another learned token follows: with the features as in decoding; with each token's own feature
    # beside it; and with its own feature, but compared with the target's best token one position later.
    shifted: Tensor | None = None
    followed: int = 0  # tokens that another learned token follows
    lengths: float = 0.0  # norms of predicted features over norms of true ones
    documents: int = 0
    with_header: int = 0  # documents with the chat template's text before an answer


@torch.no_grad()
def examine(
    head: DraftHead, target: TargetModel, documents: Documents, chosen: Sequence[int], header: Sequence[int]
) -> Findings:
    """Compare the predictions of head and target on the answers in a dataset.

    Args:
        chosen: indices of the documents to read.
        header: tokens that the chat template puts before each answer.
    """
    totals, loss = Findings(), AlignedLoss(head, Objective(soft_ce=1.0, aligned_steps=STEPS), target.logits)
    for index in Progress(chosen, desc="documents", unit="document"):
        tokens, learned = (torch.from_numpy(array).to(target.device)
                           for array in documents.collate(np.asarray([index])))  # [1, T]
        totals.documents += 1
        text = tokens[0].tolist()
        totals.with_header += any(text[at : at + len(header)] == list(header) for at in range(len(text)))
        learned[:, :2] = False  # two tokens must come before
        at = learned[0].nonzero().flatten()  # [M]
        if not len(at):
            continue
        features = target.features(tokens, use_cache=False)  # [1, T, F]
        log_p = target.logits(features[0, at - 1]).float().log_softmax(-1)  # [M, V]
        best = log_p.argmax(-1)
        totals.tokens += len(at)
        totals.own += int((best == tokens[0, at]).sum())
        totals.surprise -= float(log_p.gather(1, tokens[0, at, None]).sum())
        totals.entropy -= float((log_p.exp() * log_p).sum())
        totals.likeliest += float(log_p.amax(-1).exp().sum())
        totals.covered += int(head.names(tokens[0, at]).sum())
        agreed = loss(features, tokens, learned)[1]
        totals.agreed = agreed if totals.agreed is None else totals.agreed + agreed
        inner = at[learned[0].roll(-1)[at]]
        after, counted = target.logits(features[0, inner]).argmax(-1), torch.isin(at, inner)
        shifted = torch.zeros(3)
        for shift in (0, 1):  # as in decoding, and with each token's own feature beside it
            inputs, following = head.read(features[:, shift : shift - 2 or None]), tokens[:, 1:-1]
            positions = torch.arange(following.shape[1], device=at.device)[None]
            predicted = head(inputs, following, positions)[0, at - 2]  # [M, D]
            token = head.named(head.own_logits(predicted, target.logits).argmax(-1))
            shifted[shift] = (token == best)[counted].sum()
            if shift:
                shifted[2] = (token[counted] == after).sum()
            elif not isinstance(head, Eagle3Head):
                totals.lengths += float((predicted.norm(dim=-1) / features[0, at - 1].norm(dim=-1)).sum())
        totals.shifted = shifted if totals.shifted is None else totals.shifted + shifted
        totals.followed += len(inner)
    return totals


def verdicts(totals: Findings, eagle3: bool) -> list[str]:
    """Likely causes of a weak head, in words; an empty list if there is none."""
    count, agreed = totals.tokens, (totals.agreed / totals.tokens).tolist()
    causes = []
    if totals.with_header < totals.documents:
        causes.append(f"{totals.documents - totals.with_header} of {totals.documents} documents lack the target's chat "
                      "template: they are plain text, or were prepared with another target")
    # The end marks of a few truncated answers are very surprising too, hence the second condition.
    if totals.surprise > FOREIGN * totals.entropy and totals.own < totals.likeliest:
        causes.append("the target did not write these answers (its cross-entropy on them is "
                      f"{totals.surprise / count:.2f} nats per token, on its own samples {totals.entropy / count:.2f}; "
                      f"{totals.own / count:.0%} of the tokens are its most likely ones, of its samples "
                      f"{totals.likeliest / count:.0%}): train on its own answers (--regenerate)")
    as_used, own, following = (totals.shifted / max(1, totals.followed)).tolist()
    if agreed[0] < HARDLY:
        causes.append(f"the head hardly ever agrees with the target ({agreed[0]:.1%}): it is damaged, hardly trained, "
                      "or made for another target or for other layers")
    elif max(own, following) > as_used + SHIFTED:
        causes.append("the head is off by one: it agrees more often if it reads each token with the feature of the "
                      f"same position ({max(own, following):.2f}, in decoding {as_used:.2f})")
    elif not eagle3 and totals.lengths / count > TOO_LONG:
        causes.append(f"the head's features are {totals.lengths / count:.2f} times as long as the target's: it was "
                      "trained with another norm or layer")
    elif agreed[-1] > agreed[0] + RISING:
        causes.append(f"the head agrees more often if it reads its own predictions ({agreed[-1]:.2f}) than the "
                      f"target's features ({agreed[0]:.2f}): it was trained with another norm or layer")
    if totals.covered / count < COVERED:
        causes.append(f"the draft vocabulary covers {totals.covered / count:.1%} of the tokens: use a larger one")
    low = [position + 1 for position, (mine, good) in enumerate(zip(agreed, GOOD, strict=True)) if mine < 0.9 * good]
    if low and not causes:
        causes.append(f"the head agrees less often than SmolLM2's bundled head at positions {low}: " + (
            "train longer, on more of the target's own answers" if low[0] == 1
            else "train longer, then with aligned steps (--objective hass)"))
    return causes


def run(arguments: Arguments) -> None:
    """Print statistics and verdicts.

    Raises:
        ValueError: target, head and dataset do not match, or the dataset has no learned token.
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
    totals = examine(pair.draft, pair.target, documents, chosen, header)
    if not totals.tokens:
        raise ValueError(f"{arguments.data} has no learned token in its last {arguments.documents} documents")
    count = totals.tokens
    for name, value in {
        "learned tokens": f"{count} in {totals.documents} documents",
        "most likely to the target": f"{totals.own / count:.1%}",
        "target's cross-entropy": f"{totals.surprise / count:.2f} nats per token; entropy {totals.entropy / count:.2f}",
        "in the draft vocabulary": f"{totals.covered / count:.1%}",
        "agreement, position 1 to 5": " ".join(f"{each / count:.2f}" for each in totals.agreed.tolist())
        + f" (SmolLM2's bundled head: {' '.join(f'{each:.2f}' for each in GOOD)})",
    }.items():
        print(f"{name + ':':<28}{value}")
    for verdict in verdicts(totals, isinstance(head, Eagle3Head)) or ["no fault was detected"]:
        print(f"- {verdict}")


def main(words: Sequence[str] | None = None) -> int:
    return exit_status(
        "train.check_head", lambda: run(parse_options(Arguments, words, program="python -m train.check_head")))


if __name__ == "__main__":
    sys.exit(main())

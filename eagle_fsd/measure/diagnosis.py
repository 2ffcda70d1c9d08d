"""Diagnose a weak draft head: whether the target wrote a text, and how well the head predicts the target on it.

D hidden size, V vocabulary, F width of the target's features.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..api import generate
from ..data.conversations import TOKEN_IDS, Record, read_records
from ..data.documents import Documents
from ..data.encoding import ANYTHING, encode_dataset, render
from ..data.questions import Question
from ..heads.eagle import DraftHead
from ..heads.eagle3 import LAST_NORM, Eagle3Head
from ..heads.layouts import read_json
from ..inputs.prompts import encode_prompts
from ..inputs.requests import check_length
from ..loading.pair import EagleModel
from ..models.target import TargetModel
from ..utils.progress import Progress

MAX_LENGTH = 2048  # most tokens of a document that is not from a dataset, if the target has as many positions
BATCH = 8  # questions that are answered together
LEAST = 100  # tokens without which there is no verdict
STEPS = 5  # positions in a chain of drafts; from the second on the head reads its own predictions
FOREIGN = 1.3  # cross-entropy over entropy: 1.0 for text that the target sampled, less for its greedy answers
GOOD = (0.68, 0.59, 0.54, 0.53, 0.52)  # agreement of SmolLM2's head of version 0.4.0 on 24 held-out documents
COVERED = 0.95  # least share of learned tokens in a good draft vocabulary
HARDLY = 0.1  # an agreement below this share allows no other verdict
SHIFTED = 0.01  # least gain in agreement that shows an off-by-one error, or a config unlike that of training
SURE = 3.0  # least gain that shows such a config, in standard errors
THETA = 10000.0  # `rope_theta` of programs that ignore the config's
# Regression makes predicted features shorter than the true ones, by their cosine: 0.4 times as long after a few steps,
# 0.9 times after many. They are never longer.
TOO_LONG = 1.4
RISING = 0.05  # most by which agreement may rise from the first position to the last


@dataclass
class OtherConfig:
    """A head with some fields of its config.json changed to what it may have been trained with.

    fields: these fields.
    trained: which programs train heads so.
    agreed: [STEPS] as in `Findings`.
    squares: sum over tokens of the squared difference between the steps that agree with and without the change.
    """

    fields: dict[str, object]
    trained: str
    agreed: Tensor = field(default_factory=lambda: torch.zeros(STEPS))
    squares: float = 0.0

    def apply(self, head: DraftHead) -> DraftHead:
        """A head with these fields and the same weights."""
        changed, rope = copy.copy(head), dict(head.config.rope_parameters)
        vars(changed)["_modules"] = dict(head._modules)
        if "rope_scaling" in self.fields:
            rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        rope["rope_theta"] = self.fields.get("rope_theta", rope["rope_theta"])
        config = copy.copy(head.config)
        config.rope_parameters = rope
        changed.rotary_emb = LlamaRotaryEmbedding(config).to(head.device)
        if "norm_output" in self.fields:
            changed.norm_output = self.fields["norm_output"]
        if LAST_NORM in self.fields:
            changed.norm = nn.Identity()
        changed.refresh()
        return changed


@dataclass
class Findings:
    """Sums over learned tokens."""

    tokens: int = 0
    own: int = 0  # tokens that are the target's most likely
    surprise: float = 0.0  # -log p of the tokens, nats
    entropy: float = 0.0  # entropy of p, nats
    likeliest: float = 0.0  # max p: the expected value of `own` in text that the target has sampled
    covered: int = 0  # tokens in the draft vocabulary
    # [STEPS] of these, where the head's best token is the target's best among the tokens that the head can draft, at
    # each step of a chain of drafts. Shares are of all tokens: a token that the head cannot draft counts as a miss.
    agreed: Tensor = field(default_factory=lambda: torch.zeros(STEPS))
    # [3] tokens that another learned token follows, where the head's best token is the target's best of all: with the
    # features as in decoding; with each token's own feature beside it; and with its own feature, but compared with the
    # target's best token one position later.
    shifted: Tensor = field(default_factory=lambda: torch.zeros(3))
    followed: int = 0  # tokens that another learned token follows
    others: list[OtherConfig] = field(default_factory=list)
    lengths: float = 0.0  # norms of predicted features over norms of true ones
    documents: int = 0
    with_header: int = 0  # documents with the chat template's text before an answer; all if there is no template


def check_pair(model: EagleModel) -> None:
    """Raise ValueError unless the drafter is a head and the target has a tokenizer."""
    if not isinstance(model.draft, DraftHead):
        drafter = "no drafter" if model.draft is None else model.draft.noun
        raise ValueError(f"only draft heads can be checked, got {drafter}")
    if model.tokenizer is None:
        raise ValueError("the target has no tokenizer: save one to its directory")


def read_documents(data: Path, most: int, model: EagleModel, head: str | Path | None = None) -> Documents:
    """At most so many documents: the last ones of a dataset of prepare_data, or the first ones of a file of
    conversations or text (see `read_records`).

    Args:
        head: directory of the head. What it was trained on is left out, if the training recorded it there.

    Raises:
        ValueError: the dataset is damaged, nothing in the file can be used, or the head has learned all of it.
    """
    if data.is_dir():
        documents = Documents.load(data)
        learned = count_learned(head, documents)
        if learned == len(documents):
            raise ValueError(f"the head has learned all of {data}, and how it does there says nothing about other "
                             "texts: pass one that it did not learn, or --questions")
        return Documents.of(documents.document(index) for index in range(learned, len(documents))[-most:])
    documents, _ = encode_dataset(
        read_records(str(data)), model.tokenizer, max_length=max_length(model), quiet=True, most=most)
    return documents


def count_learned(head: str | Path | None, documents: Documents) -> int:
    """How many of a dataset's first documents a head has learned, as its training recorded; 0 if nothing tells."""
    path = Path(head or "", "evaluation.json")
    record = read_json(str(path)) if head and path.is_file() else {}
    return record.get("learned", 0) if record.get("data") == documents.digest() else 0


def max_length(model: EagleModel) -> int:
    """Most tokens of a document that is not from a dataset."""
    return min(MAX_LENGTH, model.target.max_positions or MAX_LENGTH)


def answer_questions(model: EagleModel, questions: Sequence[Question], max_new_tokens: int) -> Documents:
    """The target's greedy answers to the first turns of questions, as documents.

    Raises:
        ValueError: a question cannot be rendered or is too long, or none can be used.
    """
    chats = [[{"role": "user", "content": question.turns[0]}] for question in questions]
    prompts, _ = encode_prompts(chats, model)
    check_length(max(map(len, prompts)), max_new_tokens, model)  # before the first batch
    answers = []
    for first in Progress(range(0, len(prompts), BATCH), desc="answers", unit="batch"):
        answers += generate(prompts[first : first + BATCH], model, max_new_tokens=max_new_tokens, acceptance="exact")
    records = [Record(messages=[*chat, {"role": "assistant", "content": answer.text, TOKEN_IDS: answer.token_ids}])
               for chat, answer in zip(chats, answers, strict=True)]
    documents, _ = encode_dataset(records, model.tokenizer, max_length=max_length(model), quiet=True)
    return documents


def answer_header(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of the chat template between a question and its answer; none without a template."""
    if not tokenizer.chat_template:
        return []
    question = [{"role": "user", "content": ANYTHING}]
    return tokenizer(render(tokenizer, question, True).rpartition(ANYTHING)[2], add_special_tokens=False)["input_ids"]


def other_configs(head: DraftHead) -> list[OtherConfig]:
    """What a head may have been trained with, although its config.json differs."""
    rope = head.config.rope_parameters
    unscaled = {} if rope["rope_type"] == "default" else {"rope_scaling": None}
    others = []
    if unscaled:
        others.append(OtherConfig(unscaled, "ModelOpt exports a scaling that it has not trained with"))
    if rope["rope_theta"] != THETA:
        trained = "AngelSlim and the EAGLE authors' traineagle3 train with it whatever the config says"
        others.append(OtherConfig({"rope_theta": THETA}, trained))
        if unscaled:
            others.append(OtherConfig({"rope_theta": THETA} | unscaled, trained))
    if isinstance(head, Eagle3Head) and not isinstance(head.norm, nn.Identity):
        fields = {"norm_output": False} if head.norm_output else {LAST_NORM: False}
        others.append(OtherConfig(fields, "SpecForge before September 2026 trained heads with norm_output "
                                          f"{json.dumps(head.norm_output)} so"))
    return others


def chains(
    head: DraftHead,
    features: Tensor,  # [T, F] of the target
    tokens: Tensor,  # [T]
) -> Iterator[Tensor]:
    """Yield the predictions [T - 2, D] of each step of the chains of drafts that begin at every position: number i is
    compared with token i + 2. In step 1 the head reads the target's features, then its own prediction for the position
    before. A step is computed as one level of a tree in which each node sees the text up to its chain's beginning."""
    count, device = len(tokens) - 2, tokens.device
    inputs = true = head.to_states(features[None, :-2])
    itself = torch.eye(count, dtype=torch.bool, device=device)[None]
    ancestors = torch.ones_like(itself).tril()  # [1, T - 2, (T - 2) * steps]
    cache = head.new_cache(count * STEPS)
    for _ in range(STEPS):
        predicted = head.predict(inputs, tokens[None, 1:-1], torch.arange(count, device=device)[None], ancestors, cache)
        yield predicted[0]
        inputs = torch.cat([true[:, :1], predicted[:, :-1]], 1)
        ancestors = torch.cat([nn.functional.pad(ancestors[:, :-1], (0, 0, 1, 0)), itself], -1)


def agreements(
    head: DraftHead,
    features: Tensor,  # [T, F] of the target
    tokens: Tensor,  # [T]
    at: Tensor,  # [C] indices of tokens
    likeliest: Tensor,  # [C] the target's best among the tokens that the head can draft, as indices into `own_logits`
    target: TargetModel,
) -> Tensor:  # [STEPS, C] bool
    """Whether the head's best token is the target's, at each step of a chain of drafts."""
    return torch.stack([head.own_logits(predicted[at - 2], target.logits).argmax(-1) == likeliest
                        for predicted in chains(head, features, tokens)])


@torch.no_grad()
def examine(model: EagleModel, documents: Documents) -> Findings:
    """Compare the predictions of head and target on the learned tokens of documents.

    Args:
        model: a pair that passes `check_pair`.

    Raises:
        ValueError: no token is learned.
    """
    model.refresh()
    head, target = model.draft, model.target
    if not documents.learnable(range(len(documents))):
        raise ValueError("the documents have no learned token")
    header, totals, device = answer_header(model.tokenizer), Findings(others=other_configs(head)), target.output_device
    others = [(other, other.apply(head)) for other in totals.others]
    for index in Progress(range(len(documents)), desc="documents", unit="document"):
        tokens, learned = map(torch.from_numpy, documents.collate(np.asarray([index])))  # [1, T]
        totals.documents += 1
        text = tokens[0].tolist()
        totals.with_header += any(text[at : at + len(header)] == header for at in range(len(text)))
        learned[:, :2] = False  # two tokens must come before
        if not learned.any():
            continue
        features = target.prefill(tokens.to(target.input_device), target.new_cache(len(text))).to(device)  # [1, T, F]
        tokens, learned = tokens.to(device), learned.to(device)
        at = learned[0].nonzero().flatten()  # [M]
        log_p = target.logits(features[0, at - 1]).float().log_softmax(-1)  # [M, V]
        best = log_p.argmax(-1)
        totals.tokens += len(at)
        totals.own += int((best == tokens[0, at]).sum())
        totals.surprise -= float(log_p.gather(1, tokens[0, at, None]).sum())
        totals.entropy -= float((log_p.exp() * log_p).sum())
        totals.likeliest += float(log_p.amax(-1).exp().sum())
        covered = at[head.names(tokens[0, at])]
        totals.covered += len(covered)
        likeliest = head.target_logits(features[0, covered - 1, -head.target_hidden_size :], target.logits).argmax(-1)
        agreed = agreements(head, features[0], tokens[0], covered, likeliest, target)  # [STEPS, C]
        totals.agreed += agreed.sum(1).cpu()
        for other, changed in others:
            agreed_then = agreements(changed, features[0], tokens[0], covered, likeliest, target)
            other.agreed += agreed_then.sum(1).cpu()
            other.squares += float((agreed_then.sum(0) - agreed.sum(0)).square().sum())
        inner = at[learned[0].roll(-1)[at]]
        after, counted = target.logits(features[0, inner]).argmax(-1), torch.isin(at, inner)
        for shift in (0, 1):  # as in decoding, and with each token's own feature beside it
            inputs, following = head.to_states(features[:, shift : shift - 2 or None]), tokens[:, 1:-1]
            positions = torch.arange(following.shape[1], device=device)[None]
            predicted = head(inputs, following, positions)[0, at - 2]  # [M, D]
            token = head.own_logits(predicted, target.logits).argmax(-1)
            token = token if head.draft_tokens is None else head.draft_tokens[token]
            totals.shifted[shift] += (token == best)[counted].sum().cpu()
            if shift:
                totals.shifted[2] += (token[counted] == after).sum().cpu()
            elif not isinstance(head, Eagle3Head):
                totals.lengths += float((predicted.norm(dim=-1) / features[0, at - 1].norm(dim=-1)).sum())
        totals.followed += len(inner)
    return totals


def table(totals: Findings) -> str:
    """What was measured, in lines of text."""
    count, good = totals.tokens, " ".join(f"{share:.2f}" for share in GOOD)
    return (f"learned tokens:             {count} in {totals.documents} documents\n"
            f"most likely to the target:  {totals.own / count:.1%}\n"
            f"target's cross-entropy:     {totals.surprise / count:.2f} nats per token; entropy "
            f"{totals.entropy / count:.2f}\n"
            f"in the draft vocabulary:    {totals.covered / count:.1%}\n"
            f"agreement, position 1 to 5: {shares(totals.agreed, count)} (an early head of SmolLM2, on text like that\n"
            f"                            it learned: {good})")


def better_config(totals: Findings) -> OtherConfig | None:
    """The change of the config by which a head agrees most often, if it gains so much that chance does not explain
    it."""
    def gain(other: OtherConfig) -> float:
        return float((other.agreed - totals.agreed).sum())

    better = [other for other in totals.others
              if gain(other) > max(SHIFTED * STEPS * totals.tokens, SURE * other.squares ** 0.5)
              and other.agreed[0] >= HARDLY * totals.tokens]
    return max(better, key=gain, default=None)


def shares(agreed: Tensor, count: int) -> str:
    return " ".join(f"{part / count:.2f}" for part in agreed.tolist())


def verdicts(totals: Findings, eagle3: bool) -> list[str]:
    """Likely causes of a weak head, in words; an empty list if there is none."""
    count, agreed = totals.tokens, (totals.agreed / totals.tokens).tolist()
    if count < LEAST:
        return [f"{count} tokens are too few for a verdict: pass a text with at least {LEAST} learned tokens"]
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
    other = better_config(totals)
    if other is not None:
        causes.append(f"the head agrees more often ({shares(other.agreed, count)}) with {json.dumps(other.fields)} in "
                      f"its config.json: {other.trained}")
    elif agreed[0] < HARDLY:
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
        causes.append(f"the head cannot draft {1 - totals.covered / count:.1%} of the tokens: with a larger draft "
                      "vocabulary more are accepted, and drafting is slower")
    low = [position + 1 for position, (mine, good) in enumerate(zip(agreed, GOOD, strict=True)) if mine < 0.9 * good]
    if low and not causes:
        causes.append(f"the head agrees less often than SmolLM2's bundled head at positions {low}: " + (
            "train longer, on more of the target's own answers" if low[0] == 1
            else "train longer, then with aligned steps (--objective hass)"))
    return causes

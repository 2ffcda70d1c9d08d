"""Answers to questions under many settings of acceptance: what became of the text, and what it cost.

A setting is a name with the arguments of `make_rule`. One lossless pass shows which answers a setting would change (see
`calibration`); only those are generated again. Records are kept in a file, so that an interrupted experiment goes on
and several processes can share the work.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..acceptance import Decision, Rule, Verification, make_rule
from ..data.files import append_lines, read_lines
from ..data.questions import Question, converse
from ..engine.receipts import Output
from ..models.placement import weights_digest
from ..pair import EagleModel
from ..prompts import check_length, encode_prompt, end_tokens
from ..quality.traces import Observer, Trace
from ..settings import tree_chooser
from ..trees.config import TreeConfig
from .grading import is_right
from .methods import engine

EXACT = "exact"  # the setting that is always there
LOW = -math.log(0.2)  # regret of a token with a fifth of the best one's probability
GRAM = 4


class Meter:
    """A rule that adds up the KL of its decisions."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self.kl = rule, 0.0

    def __call__(self, verification: Verification) -> Decision:
        decision = self.rule(verification)
        if decision.kl is not None:
            self.kl += decision.kl().item()
        return decision


def repetition(tokens: Sequence[int]) -> float:
    """Share of the text's 4-grams that have occurred before."""
    grams = list(zip(*(tokens[start:] for start in range(GRAM)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def first_difference(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """Where two texts part; None where they are the same."""
    pairs = enumerate(zip_longest(tokens, reference))
    return next((at for at, (ours, theirs) in pairs if ours != theirs), None)


def describe_outputs(outputs: Sequence[Output], reference: Sequence[int] | None = None) -> dict[str, Any]:
    """What one conversation's answers are like, their turns joined.

    Returns:
        tokens; cycles and accepted (draft tokens); fuzzy_tokens: [token, regret in nats] of those that only the rule
        accepted; low: tokens below a fifth of the target's best probability; logprob and regret: sums in nats under the
        target; repetition; cut_off: whether any turn ended at the length limit; differs_at: first token that differs
        from `reference`.
    """
    tokens = [token for output in outputs for token in output.token_ids]
    receipts = [receipt for output in outputs for receipt in output.receipts]
    lengths = [length for output in outputs for length in output.stats.accepted_lengths]
    return {
        "tokens": len(tokens), "cycles": len(lengths), "accepted": sum(lengths),
        "fuzzy_tokens": [[token, round(receipt.regret, 4)] for token, receipt in zip(tokens, receipts, strict=True)
                         if receipt.source == "fuzzy"],
        "low": sum(receipt.regret > LOW for receipt in receipts),
        "logprob": sum(receipt.logprob for receipt in receipts),
        "regret": sum(receipt.regret for receipt in receipts),
        "repetition": repetition(tokens), "cut_off": any(output.finish_reason == "length" for output in outputs),
        "differs_at": None if reference is None else first_difference(tokens, reference),
    }


def fingerprint(questions: Iterable[Question]) -> str:
    """A hash of the questions, by which a file of answers knows what it answers."""
    return hashlib.sha256(repr([astuple(question) for question in questions]).encode()).hexdigest()[:16]


class Experiment:
    """Questions answered under settings.

    Args:
        settings: arguments of `make_rule` by name, `threshold` among them; lossless decoding ("exact") is always there.
        log: JSON lines file of finished records, begun for these questions, models and options.
        share: (number, count): this process does every count-th question, and writes to the same file as the others.
            The first one has to begin the file before the others come.

    Raises:
        ValueError: the file was begun for something else; a setting is bad; a question is too long for the target; or
            the tree is chosen, and not the same for all settings: their texts would tell nothing about one another.
    """

    def __init__(
        self, model: EagleModel, questions: Sequence[Question], settings: Mapping[str, Mapping[str, Any]], log: Path, *,
        temperature: float = 0.0, max_new_tokens: int = 256, seed: int = 0, tree: TreeConfig | None = None,
        run_code: bool = False, share: tuple[int, int] = (0, 1),
    ) -> None:
        assert model.draft is not None
        if EXACT in settings:
            raise ValueError(f"a setting cannot be called {EXACT!r}: that is lossless decoding, which is always there")
        self.model, self.questions, self.log, self.share = model, list(questions), log, share
        self.rules = {name: make_rule(**options) for name, options in settings.items()}
        self.temperature, self.max_new_tokens, self.seed = temperature, max_new_tokens, seed
        self.tree, self.run_code = tree, run_code
        for question in questions:
            try:
                ids = encode_prompt([{"role": "user", "content": question.turns[0]}], model)
                check_length(len(ids), 1, model)
            except ValueError as error:
                raise ValueError(f"question {question.id}: {error}") from error
        chosen = {tree_chooser(tree, rule, temperature, model)(1).tree
                  for rule in (make_rule("exact"), *self.rules.values())}
        if len(chosen) > 1:
            raise ValueError("the head has logs of several rules, by which tree=\"auto\" takes different trees for the "
                             "rules under test: give one tree")
        self.records: dict[tuple[str, int | str], dict[str, Any]] = {}
        about = {
            "questions": fingerprint(questions), "target": model.target.digest(), "head": weights_digest(model.draft),
            "dtype": str(model.target.dtype), "temperature": temperature, "max_new_tokens": max_new_tokens,
            "seed": seed, "tree": model.describe_tree(tree, temperature),
        }
        begun, *finished = read_lines(log, repair=share[0] == 0) or [None]
        if begun is None:
            log.parent.mkdir(parents=True, exist_ok=True)
            append_lines(log, [about])
        elif begun != about:
            changed = [name for name, value in about.items() if begun.get(name) != value]
            raise ValueError(f"{log} was begun with other {', '.join(changed)}; delete it or choose another file")
        for record in finished:
            self._take(record)

    def _take(self, record: dict) -> None:
        """Keep a record in memory, unless it is of a rule that has changed its meaning."""
        name, key = record["setting"], (record["setting"], record["question"])
        if name == EXACT:
            before = self.records.get(key, {"traces": {}})["traces"]
            record["traces"] = {**before, **{
                name: trace for name, trace in record["traces"].items() if trace["rule"] == repr(self.rules.get(name))
            }}
        elif record["rule"] != repr(self.rules.get(name)):
            return
        self.records[key] = record

    def _keep(self, record: dict) -> None:
        append_lines(self.log, [record])
        self._take(record)

    def _converse(self, question: Question, acceptance: Callable | Rule) -> list[Output]:
        answer = engine(self.model, acceptance=acceptance, tree=self.tree, temperature=self.temperature, seed=self.seed)
        answers = converse(lambda chat: answer(chat, self.max_new_tokens), question.turns)
        return [answer.output for answer in answers]

    def _record(self, setting: str, question: Question, outputs: list[Output], reference: list[int] | None) -> dict:
        text = outputs[-1].text or ""
        complete = len(outputs) == len(question.turns)
        right = is_right(question, text, run_code=self.run_code)
        return {"setting": setting, "question": question.id, "correct": right if right is None else right and complete,
                **describe_outputs(outputs, reference), "text": text}

    def observe(self) -> None:
        """The lossless pass: every question's exact answer, with the traces of all settings."""
        def is_missing(question: Question) -> bool:
            record = self.records.get((EXACT, question.id))
            return record is None or not self.rules.keys() <= record["traces"].keys()

        missing = [question for question in self._mine if is_missing(question)]
        for question in tqdm(missing, desc="lossless pass", unit="question", disable=None):
            observer = Observer(self.rules, end_tokens(self.model))
            outputs = self._converse(question, observer)
            tokens = [token for output in outputs for token in output.token_ids]
            traces = {name: {**asdict(trace), "rule": repr(self.rules[name])}
                      for name, trace in observer.traces.items()}
            self._keep({**self._record(EXACT, question, outputs, tokens), "kl": 0.0 if self.temperature else None,
                        "token_ids": tokens, "traces": traces})

    def answer(self, setting: str) -> None:
        """A setting's answers where they may differ from the lossless ones; after `observe`."""
        rule = self.rules[setting]
        missing = [question for question in self._mine if self._is_missing(setting, question)]
        for question in tqdm(missing, desc=setting, unit="question", disable=None):
            meter = Meter(rule)
            outputs = self._converse(question, meter)
            record = self._record(setting, question, outputs, self.records[EXACT, question.id]["token_ids"])
            self._keep({**record, "rule": repr(rule), "kl": meter.kl if self._knows_kl(rule) else None})

    @property
    def _mine(self) -> list[Question]:
        return self.questions[self.share[0] :: self.share[1]]

    def _is_missing(self, setting: str, question: Question) -> bool:
        exact = self.records.get((EXACT, question.id))
        if exact is None or setting != EXACT and setting not in exact["traces"]:
            return True
        return (setting, question.id) not in self.records and exact["traces"][setting]["diverges"]

    def _knows_kl(self, rule: Rule) -> bool:
        return self.temperature > 0 and rule.knows_kl

    def traces(self, setting: str) -> list[Trace]:
        """What the setting would have done in each lossless answer."""
        found = [self.records[EXACT, question.id]["traces"][setting] for question in self.questions]
        return [Trace(trace["lengths"], trace["costs"], trace["diverges"]) for trace in found]

    def results(self, setting: str) -> list[dict[str, Any]]:
        """A setting's records in the order of the questions, those that equal the lossless ones included.

        Raises:
            ValueError: some are not there yet.
        """
        missing = sum(self._is_missing(setting, question) for question in self.questions)
        if missing:
            raise ValueError(f"{missing} answers of {setting} are missing in {self.log}: finish them first")
        found = []
        for question in self.questions:
            record = self.records.get((setting, question.id))
            if record is None:
                exact = self.records[EXACT, question.id]
                kl = sum(exact["traces"][setting]["costs"]) if self._knows_kl(self.rules[setting]) else None
                record = {**exact, "setting": setting, "kl": kl}
            found.append(record)
        return found


def summarise(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Means over the answers of one setting; rates are per token, `low_per_thousand` per thousand tokens."""
    records = list(records)
    tokens, cycles = sum(r["tokens"] for r in records), sum(r["cycles"] for r in records)
    graded = [r["correct"] for r in records if r["correct"] is not None]
    parted = [r["differs_at"] for r in records if r["differs_at"] is not None]
    kl = [r["kl"] for r in records]
    return {
        "answers": len(records),
        "accuracy": statistics.fmean(graded) if graded else None,
        "tau": sum(r["accepted"] for r in records) / cycles + 1 if cycles else 1.0,
        "tokens_per_answer": tokens / len(records),
        "cycles_per_answer": cycles / len(records),
        "fuzzy_share": sum(len(r["fuzzy_tokens"]) for r in records) / tokens,
        "low_per_thousand": 1000 * sum(r["low"] for r in records) / tokens,
        "logprob_per_token": sum(r["logprob"] for r in records) / tokens,
        "regret_per_token": sum(r["regret"] for r in records) / tokens,
        # Of all tokens that the cycles emitted, those behind an end included, as the KL is.
        "kl_per_token": None if None in kl else sum(kl) / max(1, cycles + sum(r["accepted"] for r in records)),
        "differing": len(parted) / len(records),
        "median_first_difference": statistics.median(parted) if parted else None,
        "repetition": statistics.fmean(r["repetition"] for r in records),
        "cut_off": statistics.fmean(r["cut_off"] for r in records),
    }


def paired(records: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> tuple[int, int, int]:
    """(lost, gained, count) of graded answers: right only in the reference, right only here, all pairs."""
    pairs = [(theirs["correct"], ours["correct"]) for ours, theirs in zip(records, reference, strict=True)
             if ours["correct"] is not None]
    return (sum(theirs and not ours for theirs, ours in pairs), sum(ours and not theirs for theirs, ours in pairs),
            len(pairs))


def spread(questions: Sequence[Question], count: int) -> list[Question]:
    """At most `count` of the questions, evenly spaced: files are often sorted by category."""
    count = min(count, len(questions))
    return [questions[number * len(questions) // count] for number in range(count)]


def settings_of(rules: Mapping[str, Sequence[float]], **options: object) -> dict[str, dict[str, Any]]:
    """Settings "rule threshold" of several rules and their thresholds; `options` go to all."""
    return {f"{rule} {threshold:g}": {"rule": rule, "threshold": threshold, **options}
            for rule, thresholds in rules.items() for threshold in thresholds}

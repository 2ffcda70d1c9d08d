"""Answers to questions under many settings of acceptance: what became of the text, and what it cost.

A setting is a name with the arguments of `make_rule`. One lossless pass shows which answers a setting would change (see
`quality.traces`); only those are generated again. Records are kept in a file, so that an interrupted experiment goes on
and several processes can share the work.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, astuple
from functools import partial
from pathlib import Path
from typing import Any

from ..acceptance import Decision, Rule, Verification, make_rule
from ..acceptance.judge import Judge
from ..acceptance.prose import Prose
from ..api import generate
from ..data.files import append_lines, read_lines
from ..data.progress import Progress
from ..data.questions import Question
from ..drafting.config import TreeConfig
from ..engine.receipts import Output
from ..measure.traces import Observer, Trace, joined
from ..models.placement import weights_digest
from ..pair import EagleModel
from ..prompts import check_length, encode_prompt, end_tokens
from ..serve.engine import Engine
from ..settings import equipped, tree_chooser
from .grading import is_right
from .ifeval import check_instructions
from .methods import prompt_seed
from .summaries import conversation_record

log = logging.getLogger(__name__)
EXACT = "exact"  # the setting that is always there


class Meter:
    """A rule of one request that adds up the KL of its decisions."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self.kl = rule, 0.0

    def __call__(self, verification: Verification) -> Decision:
        decision = self.rule(verification)
        if decision.kl is not None:
            self.kl += decision.kl().item()
        return decision


def meaning(rule: Rule) -> str:
    """What a rule under test is, by which its records are known again: its options, and the judge or the marks that it
    goes by."""
    judges = [part.learned.weight for part in rule.parts if isinstance(part, Judge) and part.learned is not None]
    marks = [part.marks.moves for part in rule.parts if isinstance(part, Prose) and part.marks is not None]
    digests = [hashlib.sha256(found.cpu().numpy().tobytes()).hexdigest()[:16] for found in (*judges, *marks)]
    return " ".join([repr(rule), *digests])


def fingerprint(questions: Iterable[Question]) -> str:
    """A hash of the questions, by which a file of answers knows what it answers."""
    return hashlib.sha256(repr([astuple(question) for question in questions]).encode()).hexdigest()[:16]


class Experiment:
    """Questions answered under settings.

    Args:
        settings: arguments of `make_rule` by name, `threshold` among them; lossless decoding ("exact") is always there.
        log: JSON lines file of finished records, begun for these models and options. It may hold other questions too:
            an experiment goes on with more of them.
        share: (number, count): this process does every count-th question, and writes to the same file as the others.
            The first one has to begin the file before the others come.
        batch: questions that are answered together, each joining as another ends; it takes a tree. In half precision
            ties may fall otherwise in other company.

    Raises:
        ValueError: the file was begun for something else; a setting is bad; a question is too long for the target, or
            cannot be graded here; or the tree is chosen, and not the same for all settings: their texts would tell
            nothing about one another.
    """

    def __init__(
        self, model: EagleModel, questions: Sequence[Question], settings: Mapping[str, Mapping[str, Any]], log: Path, *,
        temperature: float = 0.0, top_p: float = 1.0, max_new_tokens: int = 256, seed: int = 0,
        tree: TreeConfig | None = None, run_code: bool = False, share: tuple[int, int] = (0, 1),
        batch: int = 1,
    ) -> None:
        assert model.draft is not None
        if EXACT in settings:
            raise ValueError(f"a setting cannot be called {EXACT!r}: that is lossless decoding, which is always there")
        self.model, self.questions, self.log, self.share = model, list(questions), log, share
        self.rules = {name: equipped(make_rule(**options), model) for name, options in settings.items()}
        self.batch, self.top_p = batch, top_p
        self.temperature, self.max_new_tokens, self.seed = temperature, max_new_tokens, seed
        self.tree, self.run_code = tree, run_code
        check_instructions(questions)
        for question in questions:
            self._encoded(question, [{"role": "user", "content": question.turns[0]}])
        chosen = {tree_chooser(tree, rule, temperature, model)(1).tree
                  for rule in (make_rule("exact"), *self.rules.values())}
        if batch > 1 and (tree is None or tree.least_reach or tree.least_probability):
            raise ValueError(f"questions that are answered together (batch={batch}) take a tree without stopping "
                             f"rules, which look at all of them, got {tree}")
        if len(chosen) > 1:
            raise ValueError("the head has logs of several rules, by which tree=\"auto\" takes different trees for the "
                             "rules under test: give one tree")
        self._asked = {question.id: fingerprint([question]) for question in questions}
        self.records: dict[tuple[str, int | str], dict[str, Any]] = {}
        about = {
            "target": model.target.digest(), "head": weights_digest(model.draft), "dtype": str(model.target.dtype),
            "temperature": temperature, "max_new_tokens": max_new_tokens, "seed": seed,
            "tree": model.describe_tree(tree, temperature), **({"top_p": top_p} if top_p < 1 else {}),
            **({"batch": batch} if batch > 1 else {}),
        }
        begun, *finished = read_lines(log, repair=share[0] == 0) or [None]
        if begun is None:
            log.parent.mkdir(parents=True, exist_ok=True)
            append_lines(log, [about])
        elif begun != about:
            changed = [name for name in {**about, **begun} if begun.get(name) != about.get(name)]
            raise ValueError(f"{log} was begun with other {', '.join(changed)}; delete it or choose another file")
        for record in finished:
            self._take(record)

    def _take(self, record: dict) -> None:
        """Keep a record in memory, unless it is of another question or of a rule that has changed its meaning."""
        name, key = record["setting"], (record["setting"], record["question"])
        if record["asked"] != self._asked.get(record["question"]):
            return
        if name == EXACT:
            before = self.records.get(key, {"traces": {}})["traces"]
            record["traces"] = {**before, **{
                name: trace for name, trace in record["traces"].items() if trace["rule"] == self._meaning(name)
            }}
        elif record["rule"] != self._meaning(name):
            return
        self.records[key] = record

    def _meaning(self, name: str) -> str | None:
        return meaning(self.rules[name]) if name in self.rules else None

    def _keep(self, record: dict) -> None:
        append_lines(self.log, [record])
        self._take(record)

    def _answers(
        self, questions: Sequence[Question], acceptance: Callable[[], Rule | Observer | Meter], desc: str
    ) -> Iterator[tuple[Question, list[Output], list[Any]]]:
        """Each question's answers, turn by turn, with the rule that decided on each; in the order in which they end."""
        def converse(question: Question, ask: Callable[..., Output]) -> tuple[Question, list[Output], list[Any]]:
            return question, *self._converse(question, ask, acceptance)

        with ExitStack() as stack:
            progress = stack.enter_context(Progress(desc=desc, unit="question", total=len(questions)))
            if self.batch == 1 or not questions:
                alone = partial(generate, model=self.model, tree=self.tree)
                found = (converse(question, alone) for question in questions)
            else:
                pool = stack.enter_context(ThreadPoolExecutor(self.batch))  # each thread waits for its question
                engine = stack.enter_context(Engine(
                    self.model, max_rows=self.batch, max_waiting=self.batch, prefixes=0, tree=self.tree))
                stack.callback(pool.shutdown, wait=False, cancel_futures=True)
                found = (each.result() for each in as_completed([pool.submit(
                    converse, question, lambda ids, **options: engine.submit(ids, **options).result(),
                ) for question in questions]))
            for each in found:
                yield each
                progress.update(1)

    def _converse(
        self, question: Question, ask: Callable[..., Output], acceptance: Callable[[], Rule | Observer | Meter]
    ) -> tuple[list[Output], list[Any]]:
        """The answers of a conversation, and the rules that decided on them.

        One that has outgrown the target ends with the turns it has, as in `converse`.
        """
        chat: list[dict[str, str]] = []
        outputs, rules = [], []
        for turn in question.turns:
            chat.append({"role": "user", "content": turn})
            ids = self._encoded(question, chat)
            if ids is None:
                break
            rules.append(acceptance())
            outputs.append(ask(
                ids, acceptance=rules[-1], temperature=self.temperature, top_p=self.top_p,
                max_new_tokens=self.max_new_tokens, seed=prompt_seed(self.seed, chat)))
            chat.append({"role": "assistant", "content": outputs[-1].text})
        return outputs, rules

    def _encoded(self, question: Question, chat: list[dict[str, str]]) -> list[int] | None:
        """The chat's tokens; None: it is too long, behind the first turn.

        Raises:
            ValueError: the first turn is.
        """
        try:
            ids = encode_prompt(chat, self.model)
            check_length(len(ids), 1, self.model)
        except ValueError as error:
            if len(chat) == 1:
                raise ValueError(f"question {question.id}: {error}") from error
            log.warning("question %s ends before turn %d: %s", question.id, len(chat) // 2 + 1, error)
            return None
        return ids

    def _record(self, setting: str, question: Question, outputs: list[Output], reference: list[int] | None) -> dict:
        text = outputs[-1].text or ""
        complete = len(outputs) == len(question.turns)
        right = is_right(question, text, run_code=self.run_code)
        return {"setting": setting, "question": question.id, "asked": self._asked[question.id],
                "correct": right if right is None else right and complete, **conversation_record(outputs, reference),
                "text": text}

    def observe(self, again: bool = True) -> None:
        """The lossless pass: every question's exact answer, with the traces of all settings.

        Args:
            again: answer those again that lack the trace of a setting, which was not asked for then.
        """
        def is_missing(question: Question) -> bool:
            record = self.records.get((EXACT, question.id))
            return record is None or again and not self.rules.keys() <= record["traces"].keys()

        missing = [question for question in self._mine if is_missing(question)]
        ends = end_tokens(self.model)
        for question, outputs, observers in self._answers(missing, lambda: Observer(self.rules, ends), "lossless pass"):
            tokens = [token for output in outputs for token in output.token_ids]
            traces = {name: {**asdict(joined([observer.traces[name] for observer in observers])), "rule": meaning(rule)}
                      for name, rule in self.rules.items()}
            self._keep({**self._record(EXACT, question, outputs, tokens), "kl": 0.0 if self.temperature else None,
                        "token_ids": tokens, "traces": traces})

    def answer(self, setting: str) -> None:
        """A setting's answers where they may differ from the lossless ones; after `observe`."""
        rule = self.rules[setting]
        meters = self._knows_kl(rule)
        missing = [question for question in self._mine if self._is_missing(setting, question)]
        for question, outputs, rules in self._answers(missing, lambda: Meter(rule) if meters else rule, setting):
            record = self._record(setting, question, outputs, self.records[EXACT, question.id]["token_ids"])
            kl = math.fsum(meter.kl for meter in rules) if meters else None
            self._keep({**record, "rule": meaning(rule), "kl": kl})

    @property
    def _mine(self) -> list[Question]:
        return self.questions[self.share[0] :: self.share[1]]

    def _is_missing(self, setting: str, question: Question) -> bool:
        exact = self.records.get((EXACT, question.id))
        if exact is None or (setting, question.id) in self.records:
            return exact is None
        return setting not in exact["traces"] or exact["traces"][setting]["diverges"]

    def _knows_kl(self, rule: Rule) -> bool:
        return self.temperature > 0 and rule.knows_kl

    def traces(self, setting: str) -> list[Trace]:
        """What the setting would have done in each lossless answer; empty where some lack its trace."""
        found = [self.records[EXACT, question.id]["traces"].get(setting) for question in self.questions]
        return [] if None in found else [Trace(trace["lengths"], trace["costs"], trace["diverges"]) for trace in found]

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


def spread(questions: Sequence[Question], count: int) -> list[Question]:
    """At most `count` of the questions, evenly spaced: files are often sorted by category."""
    count = min(count, len(questions))
    return [questions[number * len(questions) // count] for number in range(count)]


def settings_of(rules: Mapping[str, Sequence[float]], **options: object) -> dict[str, dict[str, Any]]:
    """Settings "rule threshold" of several rules and their thresholds; `options` go to all."""
    return {f"{rule} {threshold:g}": {"rule": rule, "threshold": threshold, **options}
            for rule, thresholds in rules.items() for threshold in thresholds}

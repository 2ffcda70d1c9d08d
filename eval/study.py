"""The stages of the study on one GPU, their sizes, and what they have found so far (`eval.gpu_study`)."""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import eagle_fsd
from eagle_fsd.data.documents import Documents
from eagle_fsd.data.files import save_atomically
from eagle_fsd.experiments.methods import Answer, Method, interleaved
from eagle_fsd.pair import EagleModel
from eval import batches, benchmark, trees
from eval.time_limits import TimeIsUp, interrupted_after, steps_within
from train.demo.corpus import python_prefixes
from train.demo.demo import (
    Preset,
    head_text,
    log_trees,
    make_text,
    save_target,
    target_config,
    train_draft,
    train_target,
)
from train.demo.target import Stage, build_target, train_stage
from train.demo.tasks import is_correct, tasks


@dataclass(frozen=True)
class StudySize:
    """A study: the pair, and seconds for each stage. Steps in the preset are replaced by as many as fit."""

    preset: Preset
    target_seconds: tuple[float, ...]  # of each stage of the target's training
    head_seconds: float
    measure_seconds: float  # of each kind of prompts
    logged: int  # prompts that the tree is chosen by
    new_tokens: int
    thresholds: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    other_seconds: float  # what a stage that cannot be interrupted takes at most, models loaded and latencies measured


STUDY_SIZES = {
    "gpu": StudySize(
        Preset(vocab_size=4096, hidden=768, intermediate=1920, heads=12, kv_heads=4, documents=160_000,
               python_share=0.3, practice=("list", "table") * 2, installed=True, answers=4096, answer_batch=512,
               stages=(Stage(6, 1, lr=2e-3, batch=32_768), Stage(24, 1, lr=1.5e-3, decay=0.6, batch=32_768)),
               head={"objective": "sparse", "batch_tokens": 32_768, "lr": 1e-3, "warmup": 100, "evaluate": False,
                     "save_every": 500}),
        target_seconds=(120, 300), head_seconds=240, measure_seconds=110, logged=12, new_tokens=128,
        thresholds=(0.05, 0.1, 0.3), batch_sizes=(1, 2, 4, 8), other_seconds=180),
    "toy": StudySize(
        Preset(vocab_size=400, hidden=32, intermediate=64, heads=2, kv_heads=1, documents=120, python_share=0.1,
               practice=(), questions=200, answers=12,
               stages=(Stage(1, 1, lr=2e-3, batch=1024), Stage(2, 1, lr=2e-3, decay=0.6, batch=1024)),
               head={"objective": "sparse", "batch_tokens": 1024, "lr": 1e-3, "warmup": 2, "evaluate": False,
                     "save_every": 50}),
        target_seconds=(0.5, 0.5), head_seconds=0.5, measure_seconds=0.5, logged=6, new_tokens=24,
        thresholds=(0.3,), batch_sizes=(1, 2), other_seconds=10),
}


class Study:
    """The stages in order, and what they have found so far, in a folder."""

    def __init__(self, size: StudySize, work: Path, device: str, options: Mapping[str, object]) -> None:
        self.size, self.work, self.device, self.options = size, work, device, options
        self.preset, self.file = size.preset, work / "study.json"
        self.state: dict = {"results": {}, "seconds": {}, "steps": {}}
        if self.file.exists():
            self.state = json.loads(self.file.read_text(encoding="utf-8"))
        self._model: EagleModel | None = None

    def save(self) -> None:
        text = json.dumps(self.state, indent=1) + "\n"
        save_atomically(self.file, lambda part: part.write_text(text, encoding="utf-8"))

    def steps(self, name: str, seconds: float, trial: Callable[[int], object]) -> int:
        """Steps of a training stage; measured once."""
        if name not in self.state["steps"]:
            self.state["steps"][name] = steps_within(seconds, trial)
            self.save()
        return self.state["steps"][name]

    def text(self) -> dict:
        tokenizer, documents = make_text(self.preset, self.work)
        return {"documents": len(documents), "tokens": len(documents.tokens), "vocabulary": len(tokenizer)}

    def _planned(self) -> Preset:
        """The preset with as many steps of the target as fit."""
        tokenizer, documents = make_text(self.preset, self.work)
        stages = []
        for number, (stage, seconds) in enumerate(zip(self.preset.stages, self.size.target_seconds, strict=True)):
            def trial(steps: int, stage: Stage = stage) -> None:
                scratch = self.work / "trial.pt"
                scratch.unlink(missing_ok=True)
                train_stage(build_target(target_config(self.preset, stage.layers, tokenizer), seed=0),
                            replace(stage, steps=steps), documents, seed=0, checkpoint=scratch, device=self.device)
                scratch.unlink()

            stages.append(replace(stage, steps=self.steps(f"target {number}", seconds, trial)))
        return replace(self.preset, stages=tuple(stages))

    def _trained(self) -> tuple:
        model, tokenizer = train_target(self._planned(), self.work, self.device)
        return model.to(self.device, torch.float32 if self.device == "cpu" else torch.bfloat16), tokenizer

    def target(self) -> dict:
        model, tokenizer = self._trained()
        save_target(model, tokenizer, self.work / "demo-target")
        return {"parameters": sum(p.numel() for p in model.parameters()),
                "layers": model.config.num_hidden_layers, "hidden_size": model.config.hidden_size}

    def answers(self) -> dict:
        head_text(self.preset, self.work, *self._trained())
        return {"documents": len(Documents.load(self.work / "head-text"))}

    def head(self) -> dict:
        target = self.work / "demo-target"

        def with_steps(steps: int) -> Preset:
            return replace(self.preset, head={**self.preset.head, "steps": steps})

        def trial(steps: int) -> None:
            scratch = self.work / "head-trial"
            shutil.rmtree(scratch, ignore_errors=True)
            train_draft(with_steps(steps), self.work, target, self.device, scratch)

        steps = self.steps("head", self.size.head_seconds, trial)
        train_draft(with_steps(steps), self.work, target, self.device)
        return {"steps": steps}

    def tree(self) -> dict:
        log_trees(self.work / "demo-target", self.work / "head" / "head", self.device, count=self.size.logged,
                  temperatures=(0.0,), max_new_tokens=self.size.new_tokens)
        return {"tree": self.model.describe_tree(None)}

    @property
    def model(self) -> EagleModel:
        """The trained pair, as a user would load it."""
        if self._model is None:
            self._model = eagle_fsd.load(
                self.work / "demo-target", self.work / "head" / "head", **{"device": self.device, **self.options})
        return self._model

    def methods(self) -> dict[str, Method]:
        return benchmark.methods_of(self.model, None, list(self.size.thresholds), [])

    def tasks(self) -> dict:
        questions = list(tasks("heldout", seed=1, count=200))
        answers = self.within(self.methods(), [task.messages for task in questions])
        return {"rows": benchmark.method_rows(answers, self.correct(questions, answers))}

    def python(self) -> dict:
        return {"rows": benchmark.method_rows(self.within(self.methods(), python_prefixes(100)), None)}

    def accuracy(self) -> dict:
        methods = {name: method for name, method in self.methods().items() if name.startswith(("exact", "fsd"))}
        questions = list(tasks("heldout", seed=2, count=2000))
        answers = self.within(methods, [task.messages for task in questions])
        correct = self.correct(questions, answers)
        return {"rows": [{
            **trees.timing_row(name, given, answers["exact"]), "accuracy": statistics.fmean(correct[name]),
            "prompts": len(given), "tokens_per_answer": statistics.fmean(len(answer.token_ids) for answer in given),
        } for name, given in answers.items()]}

    def batches(self) -> dict:
        methods = batches.batch_methods(self.model, None, self.size.thresholds[-1:])
        return {"rows": batches.by_size(
            self.model, methods, self.size.batch_sizes, [None], prompts=max(self.size.batch_sizes),
            max_new_tokens=self.size.new_tokens, repeats=1, seed=3)}

    def within(self, methods: Mapping[str, Method], prompts: Sequence) -> dict[str, list[Answer]]:
        """Every method's answers to as many prompts as fit, at least two."""
        started, answers = time.perf_counter(), defaultdict(list)
        for number, prompt in enumerate(prompts):
            found = interleaved(methods, [prompt], self.size.new_tokens, 1, warm_up=int(number == 0), start=number)
            for name, given in found.items():
                answers[name] += given
            if number and time.perf_counter() - started > self.size.measure_seconds:
                break
        return answers

    @staticmethod
    def correct(questions: Sequence, answers: Mapping[str, list[Answer]]) -> dict[str, list[bool]]:
        return {name: [is_correct(task, answer.text) for task, answer in zip(questions, given, strict=False)]
                for name, given in answers.items()}

    STAGES = ("text", "target", "answers", "head", "tree", "tasks", "python", "accuracy", "batches")
    INTERRUPTIBLE = ("target", "answers", "head")

    def run(self, seconds: float) -> bool:
        """Work for at most so long; whether everything is done."""
        end, begun = time.perf_counter() + seconds, False
        for name in self.STAGES:
            if name in self.state["results"]:
                continue
            left = end - time.perf_counter()
            if begun and left < (0 if name in self.INTERRUPTIBLE else self.size.other_seconds):
                return False
            begun, started = True, time.perf_counter()
            try:
                with interrupted_after(left) if name in self.INTERRUPTIBLE else nullcontext():
                    self.state["results"][name] = getattr(self, name)()
            except TimeIsUp:
                return False
            finally:
                spent = self.state["seconds"].get(name, 0) + time.perf_counter() - started
                self.state["seconds"][name] = spent
                self.save()
        return True

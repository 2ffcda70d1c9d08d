"""What a run measures: tau as estimated while training, and by decoding with the finished head."""

from __future__ import annotations

import json
import logging
import shutil
import time

import torch

from eagle_fsd.data.files import read_lines
from eagle_fsd.heads.checkpoint import save_head
from eagle_fsd.heads.eagle import DraftHead
from eagle_fsd.pair import fit_head
from train.core.card import curve_of, measure, write_card
from train.core.estimate import estimate_tau
from train.core.processes import Abandoned, StopRequest
from train.core.run import Run
from train.core.states import Logs

log = logging.getLogger("train.train_draft_head")


class Evaluation:
    """The evaluations of a run, which write `best` and `head` into its folder.

    Args:
        logs: with the evaluations of the run so far.
        stop: what abandons an estimate.
    """

    def __init__(self, run: Run, logs: Logs, stop: StopRequest) -> None:
        self.run, self.logs, self.stop = run, logs, stop
        # A state is saved before its step is evaluated: a resumed run may find an evaluation of its own step.
        self.known: dict[int, dict[str, float]] = {
            line["step"]: line["tau"] for line in read_lines(run.output / "eval.jsonl", repair=False)}
        self.best_tau = max((tau["exact"] for tau in self.known.values()), default=0.0)

    @property
    def due(self) -> bool:
        """Whether the present step is to be evaluated and was not."""
        run, config = self.run, self.run.config
        regular = 0 < run.step < run.steps and run.step % config.eval_every == 0
        return config.evaluate and regular and run.step not in self.known

    def estimate(self, head: DraftHead | None = None) -> dict[str, float] | None:
        """Estimated tau of each rule on held-out text; the best head so far is kept.

        None but on the main process, and there where the run was asked to stop meanwhile.

        Args:
            head: the present one; None: taken from the model, for which all processes must call.
        """
        run, head = self.run, head or self.run.current_head()
        target, split = run.teacher.target, run.split
        if head is None or target is None:
            return None
        fit_head(head, target)
        started, config = time.perf_counter(), run.config
        try:
            taus = estimate_tau(
                target, head, split.held_out, split.measured.tolist(),
                {name: rule.threshold for name, rule in config.rules.items()}, config.tree_config,
                most_tokens=config.eval_tokens, proceed=self.stop.check,
            )
        except Abandoned:
            log.info("the evaluation of step %d is abandoned: the run is to stop", run.step)
            return None
        if taus["exact"] > self.best_tau:
            self.best_tau = taus["exact"]
            self.save(head, "best", taus)
        self.known[run.step] = taus
        self.logs.write("eval", {"step": run.step, "tau": taus})
        run.accelerator.log({f"tau/{name}": tau for name, tau in taus.items()}, step=run.step)
        log.info("step %d tau %s (%.0f s)", run.step, ", ".join(f"{name} {tau:.3f}" for name, tau in taus.items()),
                 time.perf_counter() - started)
        return taus

    def save(self, head: DraftHead, name: str, taus: dict[str, float] | None) -> None:
        """Put a head with its estimate into a folder of the run, in place of one that was there."""
        run, part = self.run, self.run.output / f"{name}.part"
        shutil.rmtree(part, ignore_errors=True)
        save_head(head, part, dtype=torch.bfloat16 if run.config.target_dtype == "bfloat16" else torch.float32)
        (part / "estimate.json").write_text(json.dumps({"step": run.step, "tau": taus}, indent=1) + "\n")
        shutil.rmtree(run.output / name, ignore_errors=True)
        part.rename(run.output / name)

    def finish(self) -> None:
        """Save the head and, where there is to be an evaluation, decode with it for real and write its card.

        Raises:
            KeyboardInterrupt: the run was to stop.
        """
        run, config, directory = self.run, self.run.config, self.run.output / "head"
        head, target, split = run.current_head(), run.teacher.target, run.split
        if head is None:
            return
        if target is None or not config.evaluate:
            self.save(head, "head", None)
            log.info("the head is in %s; evaluate=false: nothing was measured", directory)
            return
        fit_head(head, target)
        taus = self.known.get(run.step) or self.estimate(head)
        if taus is None:
            raise KeyboardInterrupt
        self.save(head, "head", taus)
        decoded = measure(target, head, split.held_out, split.measured.tolist(), config.rules, config.tree_config,
                          prompts=config.decode_prompts, new_tokens=config.decode_tokens)
        write_card(directory, config, run.steps, len(split.learned), taus, decoded, curve_of(run.output))
        log.info("the head is in %s", directory)

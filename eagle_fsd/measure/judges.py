"""Learned judges, stored beside a head with what they were learned from. D hidden size of the target, S signals."""

from __future__ import annotations

import json
import logging
import weakref
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..acceptance import Rule
from ..acceptance.judge import SIGNALS, Judge, LearnedJudge
from ..checks import require_number
from ..data.files import save_atomically
from ..data.sources import fetch
from ..heads.eagle import DraftHead
from ..models.placement import weights_digest
from ..models.target import TargetModel

log = logging.getLogger(__name__)

JUDGE_FILE = "judge.safetensors"
COMMAND = "python -m train.judge"
_checked: weakref.WeakKeyDictionary[LearnedJudge, tuple] = weakref.WeakKeyDictionary()  # the pair it was seen with
CARD = ("target", "head", "signals", "hidden_size", "floor")  # of what is read here


def read_judge(head: str | Path) -> LearnedJudge | None:
    """That stored beside a head, in a directory or hub repository; None where there is none.

    Raises:
        ValueError: the file is damaged, or of signals that are not those of today.
    """
    path = fetch(str(head), JUDGE_FILE)
    if path is None:
        return None
    try:
        with safe_open(path, "pt") as file:
            card = json.loads(file.metadata()["card"])
            weight, mean, scale, bias = (file.get_tensor(name).float() for name in ("weight", "mean", "scale", "bias"))
        found = LearnedJudge(weight, mean, scale, bias.item(), card)
        _check(found)
    except Exception as error:  # safetensors raises its own
        raise ValueError(f"{path} cannot be read ({error}); delete it and run {COMMAND} again") from error
    return found


def _check_pair(judge: LearnedJudge, target: TargetModel, head: DraftHead | None) -> None:
    """Raise or warn where the judge belongs to another pair; the same pair is looked at once."""
    pair = weakref.ref(target), head and weakref.ref(head)
    if _checked.get(judge) == pair:
        return
    if judge.card["target"] != target.digest():
        raise ValueError(f"the {JUDGE_FILE} beside the head was made for the target {judge.card['target']}, and this "
                         f"is {target.digest()}: make one with {COMMAND}")
    if head is not None and judge.card["head"] != weights_digest(head):
        log.warning("the judge was made with another head: its probabilities may be wrong")
    _checked[judge] = pair


def _check(judge: LearnedJudge) -> None:
    missing = [name for name in CARD if name not in judge.card]
    if missing:
        raise ValueError(f"its card has no {', '.join(missing)}")
    if judge.card["signals"] != list(SIGNALS):
        raise ValueError(f"it reads the signals {judge.card['signals']}, not {list(SIGNALS)}")
    require_number("floor of its card", judge.floor, "above 0 and at most 1", lambda floor: 0 < floor <= 1)
    shapes = [list(part.shape) for part in (judge.weight, judge.mean, judge.scale)]
    if judge.weight.dim() != 1 or judge.width != judge.card["hidden_size"] or shapes.count(shapes[0]) != 3:
        raise ValueError(f"weight, mean and scale are of shapes {shapes}, not 3 times "
                         f"[{judge.card['hidden_size'] + len(SIGNALS)}]")
    finite = all(part.isfinite().all() for part in (judge.weight, judge.mean, judge.scale, torch.tensor(judge.bias)))
    if not finite or not (judge.scale > 0).all():
        raise ValueError("it holds numbers that are not finite, or scales that are not above 0")


def store_judge(head: str | Path, judge: LearnedJudge) -> Path:
    """Write it beside a head, with its card in the file and as judge.json; returns the path of the file."""
    card = {**judge.card, "signals": list(SIGNALS), "hidden_size": judge.width}
    path = Path(head) / JUDGE_FILE
    tensors = {"weight": judge.weight, "mean": judge.mean, "scale": judge.scale, "bias": torch.tensor([judge.bias])}
    tensors = {name: value.float().contiguous() for name, value in tensors.items()}
    save_atomically(path, lambda part: save_file(tensors, part, metadata={"format": "pt", "card": json.dumps(card)}))
    text = json.dumps(card, indent=1) + "\n"
    save_atomically(path.with_suffix(".json"), lambda part: part.write_text(text, encoding="utf-8"))
    return path


def equip(rule: Rule, judge: LearnedJudge | None, target: TargetModel, head: DraftHead | None) -> Rule:
    """The rule, with the pair's judge for those of its parts that want one; one that is lossless, greedy and
    sampling, wants none.

    Raises:
        ValueError: there is none, or it was made for another target.
    """
    lossless = all(map(rule.is_lossless, (True, False)))
    if lossless or not any(isinstance(part, Judge) and part.learned is None for part in rule.parts):
        return rule
    if judge is None:
        raise ValueError(f"rule {rule.name!r} needs a judge, and there is no {JUDGE_FILE} beside the head: "
                         f"python -m train.mine and {COMMAND} make one")
    _check_pair(judge, target, head)

    def with_judge(part: Rule) -> Rule:
        return replace(part, learned=judge) if isinstance(part, Judge) and part.learned is None else part

    return rule.each_part(with_judge)

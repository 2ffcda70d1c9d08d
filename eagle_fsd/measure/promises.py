"""Promises about quality or speed, such as `accuracy_drop<=1%`."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Promise:
    """What a calibrated setting keeps, such as `accuracy_drop<=1%`.

    kind: "accuracy_drop" (share of answers, against lossless decoding, at most), "kl" (nats per token to the target,
    when sampling, at most), "diverging" (share of answers that differ from the lossless ones, at most) or "speedup"
    (over `model.generate`, in tokens per second, at least).
    """

    kind: str
    limit: float

    def __str__(self) -> str:
        if self.kind in ("accuracy_drop", "diverging"):
            return f"{self.kind}<={100 * self.limit:g}%"
        return f"{self.kind}{'>=' if self.kind == 'speedup' else '<='}{self.limit:g}"


def parse_promise(text: str) -> Promise:
    """The promise that a string states.

    Raises:
        ValueError: it is of no known form.
    """
    accepted = "accuracy_drop<=1%, diverging<=1%, kl<=0.02, speedup>=2.5"
    if not isinstance(text, str):
        raise TypeError(f"a promise is a string such as {accepted}; got {text!r}")
    found = re.fullmatch(r"\s*(accuracy_drop|diverging|kl|speedup)\s*(<=|>=)\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)\s*", text)
    if found is None:
        raise ValueError(f"{text!r} is no promise; accepted are such as {accepted}")
    kind, sign, number, percent = found.groups()
    share = kind in ("accuracy_drop", "diverging")
    if sign != (">=" if kind == "speedup" else "<=") or bool(percent) and not share:
        raise ValueError(f"{text!r} is no promise; accepted are such as {accepted}")
    limit = float(number) / (100 if percent else 1)
    if limit <= 0 or share and limit >= 1:
        raise ValueError(f"{text!r}: the limit must be above 0" + (" and below 100%" if share else ""))
    return Promise(kind, limit)

"""`eagle-fsd heads`, `inspect` and `export`: the published heads, what one is, and one as others load it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from tyro.conf import Positional

from ..heads.catalogue import known_heads


@dataclass(frozen=True)
class HeadsCommand:
    """List the published heads that are known, with kind, licence and source.

    Args:
        target: only those of targets whose id contains this.
    """

    target: str | None = None

    def run(self) -> None:
        wanted = (self.target or "").casefold()
        found = [head for head in known_heads() if wanted in head.target.casefold()]
        if not found:
            raise ValueError(f"no head is known for a target whose id contains {self.target!r}")
        for target, heads in itertools.groupby(found, key=lambda head: head.target):
            print(target)
            for head in heads:
                print(f"  {head.head}: {head.kind}, licence {head.licence}{', preferred' if head.preferred else ''}; "
                      f"{head.source} ({head.looked_up})")


@dataclass(frozen=True)
class InspectCommand:
    """Say what a draft head is, what it fits, and who can serve it; status 2 where it does not fit the target.

    Args:
        head: directory or hub id.
        target: directory or hub id to check the head against.
        trust_remote_code: allow a target to run code from its repository.
    """

    head: Positional[str]
    target: str | None = None
    trust_remote_code: bool = False

    def run(self) -> None:
        from ..heads.inspection import inspect_head

        found = inspect_head(self.head, self.target, trust_remote_code=self.trust_remote_code)
        for name, value in found.facts.items():
            print(f"{name + ':':<20}{value}")
        if found.target_problems is not None:
            print(f"{'target:':<20}{'; '.join(found.target_problems) or 'the head fits'} ({self.target})")
        for server, problems in found.server_problems.items():
            verdict = "; ".join(problems) + f" (eagle-fsd export --to {server})" if problems else "as it is"
            print(f"{server + ':':<20}{verdict}")
        if found.target_problems:
            raise ValueError(f"{self.head} does not fit {self.target}: {'; '.join(found.target_problems)}")


@dataclass(frozen=True)
class ExportCommand:
    """Write a draft head as another program loads it.

    Args:
        head: directory or hub id.
        to: the program.
        out: directory to write.
        target: where embeddings come from, for formats that want them in the file.
        trust_remote_code: allow a target to run code from its repository.
    """

    head: Positional[str]
    to: Literal["eagle", "sglang", "vllm"]  # those of heads.export.LAYOUTS, which imports torch
    out: str
    target: str | None = None
    trust_remote_code: bool = False

    def run(self) -> None:
        from ..heads.export import export_head
        from ..heads.token_map import TOKEN_MAP

        path = export_head(self.head, self.to, self.out, target=self.target, trust_remote_code=self.trust_remote_code)
        print(f"{path} and config.json written for {self.to}")
        if path.with_name(TOKEN_MAP).is_file():
            print(f"its draft vocabulary: --speculative-token-map {path.with_name(TOKEN_MAP)}")

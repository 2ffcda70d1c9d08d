"""`eagle-fsd generate`."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from tyro.conf import Positional

from .arguments import Acceptance, Sampling, ShardedLoading
from .terminal import SourceStreamer, describe_output, use_colour


@dataclass(frozen=True)
class GenerateCommand:
    """Answer one prompt.

    Args:
        prompt: text, or - to read it from standard input.
        chat: put the prompt through the chat template.
        stats: print tokens/s, tokens per step and token sources to standard error.
    """

    prompt: Positional[str]
    chat: bool = False
    stats: bool = False
    pair: ShardedLoading = ShardedLoading()
    sampling: Sampling = Sampling()
    acceptance: Acceptance = Acceptance()

    def run(self) -> None:
        from ..api import generate
        from ..models.parallel import of_first

        self.acceptance.check()
        model = self.pair.load()
        text = of_first(model.target.group, sys.stdin.read) if self.prompt == "-" else self.prompt
        prompt = [{"role": "user", "content": text}] if self.chat else text
        # A stop string is not part of the answer, so nothing is shown before the end.
        streamer = None if self.sampling.stop else SourceStreamer(model.tokenizer, use_colour())
        output = generate(prompt, model, **vars(self.sampling), **vars(self.acceptance), streamer=streamer)
        if streamer is None:
            print(output.text)
        if self.stats:
            print(describe_output(output), file=sys.stderr)

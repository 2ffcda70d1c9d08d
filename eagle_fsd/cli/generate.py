"""`eagle-fsd generate`."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from tyro.conf import Positional

from .arguments import Decoding, Loading
from .terminal import SourceStreamer, describe_output


@dataclass(frozen=True, kw_only=True)
class GenerateCommand:
    """Answer one prompt.

    Args:
        prompt: text, or - to read it from standard input without the last line break.
        chat: apply the chat template to the prompt.
        stats: print tokens/s, tokens per forward and token sources to standard error.
    """

    prompt: Positional[str]
    chat: bool = False
    stats: bool = False
    pair: Loading = Loading()
    decoding: Decoding

    def run(self) -> None:
        from ..api import generate

        text = sys.stdin.read().removesuffix("\n") if self.prompt == "-" else self.prompt
        if not text and not self.chat:
            raise ValueError("the prompt is empty: at least one token is needed")
        model = self.pair.load(self.decoding.tree)
        prompt = [{"role": "user", "content": text}] if self.chat else text
        streamer = SourceStreamer(model.tokenizer, self.decoding.stop_strings)
        output = generate(prompt, model, options=self.decoding, streamer=streamer)
        if not output.text.strip() and not self.chat and getattr(model.tokenizer, "chat_template", None):
            print("The answer is empty: without --chat the model continues the prompt as text; add --chat to ask it",
                  file=sys.stderr)
        if self.stats:
            print(describe_output(output), file=sys.stderr)

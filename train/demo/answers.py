"""The target's own greedy answers to task prompts, in batches, through `model.generate`."""

from __future__ import annotations

from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eagle_fsd.data.files import append_lines, read_lines
from train.demo.tasks import Task


def render(tokenizer: PreTrainedTokenizerBase, tasks: list[Task]) -> list[str]:
    """Each task's conversation up to the answer, through the chat template."""
    return [tokenizer.apply_chat_template(t.messages, tokenize=False, add_generation_prompt=True) for t in tasks]


@torch.inference_mode()
def greedy_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], *, max_new_tokens: int = 256,
    batch: int = 64, checkpoint: Path | None = None,
) -> list[str]:
    """One answer per rendered prompt, end tokens removed; prompts of similar length share a batch.

    Args:
        checkpoint: JSON lines file that each batch is added to; answers found there are not generated again.
    """
    tokenizer.padding_side = "left"
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: list[str] = [""] * len(prompts)
    done = set()
    for i, answer in read_lines(checkpoint) if checkpoint is not None else []:
        answers[i] = answer
        done.add(i)
    missing = [i for i in order if i not in done]
    for start in tqdm(range(0, len(missing), batch), desc="answers", unit="batch", disable=None):
        chosen = missing[start : start + batch]
        inputs = tokenizer([prompts[i] for i in chosen], add_special_tokens=False, padding=True, return_tensors="pt")
        inputs = inputs.to(model.device)
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        new = output[:, inputs["input_ids"].shape[1] :]
        for i, text in zip(chosen, tokenizer.batch_decode(new, skip_special_tokens=True), strict=True):
            answers[i] = text
        if checkpoint is not None:
            append_lines(checkpoint, ([i, answers[i]] for i in chosen))
    return answers

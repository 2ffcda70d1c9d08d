"""The target's own greedy answers to task prompts, in batches, through `model.generate`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from train.tasks import Task


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
        checkpoint: JSON lines file that each batch is added to; batches found there are not generated again.
    """
    tokenizer.padding_side = "left"
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: list[str] = [""] * len(prompts)
    done = 0
    if checkpoint is not None and checkpoint.exists():
        for line in checkpoint.read_text(encoding="utf-8").splitlines():
            i, answers[i] = json.loads(line)
            done += 1
    starts = range(done, len(order), batch)
    for start in tqdm(starts, desc="answers", unit="batch", disable=None):
        chosen = order[start : start + batch]
        inputs = tokenizer([prompts[i] for i in chosen], add_special_tokens=False, padding=True, return_tensors="pt")
        inputs = inputs.to(model.device)
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        new = output[:, inputs["input_ids"].shape[1] :]
        for i, text in zip(chosen, tokenizer.batch_decode(new, skip_special_tokens=True), strict=True):
            answers[i] = text
        if checkpoint is not None:
            with checkpoint.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps([i, answers[i]]) + "\n" for i in chosen)
    return answers

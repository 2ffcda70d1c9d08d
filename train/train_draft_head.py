"""Train a draft head for a target.

    accelerate launch train/train_draft_head.py --config train/configs/head.yaml target=T data=data/chat output=runs/h

Any number of processes and accelerate's own settings for FSDP or DeepSpeed (`train/configs/`). A run that was stopped,
by Ctrl-C or by force, continues from its last saved state when the same command is given again.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import logging
import math
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig

sys.path.insert(0, str(Path(__file__).parents[1]))  # launched as a file, this folder's parent is not on the path

from accelerate import Accelerator, DistributedType, InitProcessGroupKwargs  # noqa: E402
from accelerate.tracking import get_available_trackers  # noqa: E402

from eagle_fsd.acceptance.rule import check_choice  # noqa: E402
from eagle_fsd.cli.exits import exit_status  # noqa: E402
from eagle_fsd.data.documents import Documents  # noqa: E402
from eagle_fsd.files import append_lines, read_lines, write_lines  # noqa: E402
from eagle_fsd.heads.checkpoint import load_head, save_head  # noqa: E402
from eagle_fsd.heads.eagle import DraftHead  # noqa: E402
from eagle_fsd.heads.eagle3 import Eagle3Head  # noqa: E402
from eagle_fsd.heads.layouts import LAYER_IDS  # noqa: E402
from eagle_fsd.models.loading import load_target  # noqa: E402
from eagle_fsd.models.target import TargetModel  # noqa: E402
from train.card import measure, write_card  # noqa: E402
from train.config import TrainingConfig, read_config  # noqa: E402
from train.estimate import estimate_tau, last_answers  # noqa: E402
from train.feature_sources import OfflineFeatures, OnlineFeatures, TargetEnds  # noqa: E402
from train.objectives import AlignedLoss  # noqa: E402

log = logging.getLogger("train.train_draft_head")


KINDS = {"eagle2": DraftHead, "eagle3": Eagle3Head}


def text_config(config: TrainingConfig) -> PreTrainedConfig:
    """The target's, of its language model."""
    target = AutoConfig.from_pretrained(config.target, trust_remote_code=config.trust_remote_code)
    return target.get_text_config(decoder=True)


def new_head(config: TrainingConfig) -> DraftHead:
    """A freshly initialised head: one Llama layer of the target's shape, changed by `config.head`.

    Raises:
        ValueError: a kind that there is not, or a field of `config.head` that is no field of a Llama config.
    """
    text, options = text_config(config), dict(config.head)
    bias, kind = options.pop("bias", False), options.pop("kind", "eagle2")
    check_choice("head: kind", kind, tuple(KINDS))
    shape = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
             "max_position_embeddings", "rms_norm_eps", "rope_parameters", "bos_token_id", "eos_token_id",
             "pad_token_id")
    fields = {name: getattr(text, name) for name in shape if getattr(text, name, None) is not None}
    own = {"draft_vocab_size", "norm_before_residual", LAYER_IDS} if kind == "eagle3" else {"qkv_bias"}
    known = {*LlamaConfig().to_dict(), "head_dim", *own}
    unknown = options.keys() - known
    if unknown:
        raise ValueError(
            f"head has no setting {sorted(unknown)[0]!r}; it takes kind, bias and the fields of a LlamaConfig"
        )
    fields |= {"num_hidden_layers": 1, "hidden_act": "silu", "tie_word_embeddings": False, **options}
    torch.manual_seed(config.seed)
    return KINDS[kind](LlamaConfig(**fields), bias=bias)


def start_output(head: Eagle3Head, documents: Documents, ends: TargetEnds) -> None:
    """Let a new head name the tokens that are learned most often, with the target's own output layer to start from."""
    if head.d2t is not None:
        counts = np.bincount(documents.tokens[documents.learned], minlength=head.config.vocab_size)
        commonest = np.sort(np.argsort(-counts, kind="stable")[: head.draft_vocab_size])
        head.d2t.copy_(torch.from_numpy(commonest) - torch.arange(head.draft_vocab_size))
    with torch.no_grad():
        head.lm_head.weight.copy_(ends.lm_head.weight[head.target_tokens.to(ends.lm_head.weight.device)])


def learning_rate(config: TrainingConfig, step: int, steps: int) -> float:
    """Of 0-based `step`: linear up over the warm-up, then linear down to zero."""
    to_end = (steps - step) / max(1, steps - config.warmup)
    return config.lr * min((step + 1) / max(1, config.warmup), to_end, 1.0)


class Schedule:
    """Which documents each step learns from: length-bucketed batches, another order in every epoch."""

    def __init__(self, documents: Documents, allowed: np.ndarray, config: TrainingConfig) -> None:
        self.documents, self.allowed, self.config = documents, allowed, config
        self.epoch, self.batches = 0, self._epoch(0)
        self.per_epoch = len(self.batches)

    def _epoch(self, epoch: int) -> list[np.ndarray]:
        batches = self.documents.batches(self.config.batch_tokens, seed=self.config.seed * 1_000_003 + epoch)
        kept = [batch[np.isin(batch, self.allowed)] for batch in batches]
        return [batch for batch in kept if len(batch)]

    @property
    def steps(self) -> int:
        return self.config.steps or max(1, round(self.config.epochs * self.per_epoch))

    def batch(self, step: int) -> np.ndarray:
        """The documents of a step; a function of the step alone. Epochs count as many batches as the first has."""
        epoch, position = divmod(step, self.per_epoch)
        if epoch != self.epoch:
            self.epoch, self.batches = epoch, self._epoch(epoch)
        return self.batches[position % len(self.batches)]


def shares(batch: np.ndarray, parts: int) -> list[np.ndarray]:
    """A batch dealt out to `parts` forwards: every part-th document, so that all get like lengths."""
    return [batch[part::parts] for part in range(parts)]


def feature_noise(indices: np.ndarray, lengths: np.ndarray, features: Tensor, amplitude: float, seed: int) -> Tensor:
    """Uniform noise [B, T, D] in +- amplitude * 512 / length, a function of (seed, document): the same in any split
    of the batch over processes."""
    noise = torch.zeros_like(features)
    generator = torch.Generator(features.device)
    for row, (document, length) in enumerate(zip(indices.tolist(), lengths.tolist(), strict=True)):
        generator.manual_seed(hash((seed, document)) % 2**63)
        drawn = torch.rand(length, features.shape[2], generator=generator, device=features.device)
        noise[row, :length] = (drawn * 2 - 1) * (amplitude * 512 / length)
    return noise


class Run:
    """One training run in this process; `train` drives it.

    Raises:
        ValueError: settings, data, features, head and target that do not fit together; before any long work where it
            can be known.
    """

    def __init__(self, config: TrainingConfig, accelerator: Accelerator) -> None:
        self.config, self.accelerator = config, accelerator
        self.output = Path(config.output)
        self.documents = Documents.load(Path(config.data))
        self._split()
        head = load_head(config.init_from).train() if config.init_from else new_head(config)
        highest = int(self.documents.tokens.max())
        if highest >= head.config.vocab_size:
            raise ValueError(f"{config.data} has token {highest}, the head's vocabulary ends before "
                             f"{head.config.vocab_size}: it was prepared for another target")
        self.layers = head.target_layers(text_config(config).num_hidden_layers)
        if config.features is not None:
            self.features = OfflineFeatures(Path(config.features), self.documents)
            if tuple(self.features.index["layers"]) != self.layers:
                raise ValueError(f"the head reads what enters layers {list(self.layers)}, {config.features} holds "
                                 f"{self.features.index['layers']} (--layers of train.features)")
        self._load_target()
        if config.features is None:
            self.features, self.ends = OnlineFeatures(self.target), TargetEnds.of(self.target, accelerator.device)
        else:
            self.ends = self.features.ends().to(accelerator.device)
        wanted = tuple(self.ends.lm_head.weight.shape)
        if (head.config.vocab_size, head.config.hidden_size) != wanted:
            raise ValueError(f"the head is made for vocabulary and hidden size "
                             f"{(head.config.vocab_size, head.config.hidden_size)}, the target's are {wanted}")
        head.share_embeddings(self.ends.embed_tokens)
        if isinstance(head, Eagle3Head) and not config.init_from:
            start_output(head, self.documents, self.ends)
        if accelerator.device.type == "cpu":
            head.config._attn_implementation = "eager"  # its backward takes half of the time that sdpa's takes there
        self.head_kind, self.head_config, self.head_bias = type(head), head.config, head.fc.bias is not None
        optimizer = torch.optim.AdamW(
            head.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        loss = AlignedLoss(head, config.objective, self.ends.logits)
        self.model, self.optimizer = accelerator.prepare(loss, optimizer)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]  # sharding has replaced the head's own
        self.schedule = Schedule(self.documents, self.train_indices, config)
        self.steps = self.schedule.steps
        self.step, self.best_tau = 0, 0.0

    def _load_target(self) -> None:
        """The target where it is needed: by every process online, by the main one for evaluations."""
        config, accelerator = self.config, self.accelerator
        self.target: TargetModel | None = None
        if config.features is not None and not (config.evaluate and accelerator.is_main_process):
            return
        model, _ = load_target(
            config.target, dtype=config.target_dtype, device=None if config.device_map else accelerator.device,
            device_map=config.device_map, trust_remote_code=config.trust_remote_code,
        )
        model.requires_grad_(False)
        self.target = TargetModel(model)
        self.target.layers = self.layers
        if config.features is not None and self.features.index["target"] != self.target.digest():
            raise ValueError(f"{config.features} holds features of another target than {config.target}")

    def _split(self) -> None:
        config, count = self.config, len(self.documents)
        if config.eval_data is not None:
            self.eval_documents = Documents.load(Path(config.eval_data))
            self.train_indices = np.arange(count)
            self.eval_indices = np.arange(min(config.eval_documents, len(self.eval_documents)))
            return
        held = min(config.eval_documents, count // 10)
        if held < 1:
            raise ValueError(f"{config.data} has {count} documents, too few to keep some back; give eval_data")
        self.eval_documents = self.documents
        self.train_indices, self.eval_indices = np.arange(count - held), np.arange(count - held, count)

    def check_evaluation(self) -> None:
        """Raise now what the first evaluation would raise."""
        if self.config.evaluate and not any(last_answers(self.eval_documents, self.eval_indices.tolist())):
            raise ValueError("tau cannot be estimated: no held-out document has an answer of four tokens or more; "
                             "give eval_data, or evaluate=false")

    # Training ------------------------------------------------------------------------------------------------

    def train_step(self) -> dict[str, float]:
        """One optimiser step; returns what is logged, as global means."""
        config, accelerator, step = self.config, self.accelerator, self.step
        rate = learning_rate(config, step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch, parts = self.schedule.batch(step), accelerator.num_processes * accelerator.gradient_accumulation_steps
        # Every process knows the whole batch, and so by how many positions the sum has to be divided.
        count = max(1, self.documents.learnable(batch))
        loss_module = accelerator.unwrap_model(self.model)
        loss_module.start(step, self.steps)
        sums = torch.zeros(1 + loss_module.steps, device=accelerator.device)
        mine = shares(batch, parts)[accelerator.process_index :: accelerator.num_processes]
        for indices in mine:
            with accelerator.accumulate(self.model):
                loss, agreement = self.loss(indices, batch)
                # Data parallelism and accumulation take means over parts; this makes a sum of them.
                accelerator.backward(loss * parts / count)
                if accelerator.sync_gradients:
                    if config.clip == "norm":
                        accelerator.clip_grad_norm_(self.trained, config.clip_at)
                    else:
                        accelerator.clip_grad_value_(self.trained, config.clip_at)
                self.optimizer.step()
                self.optimizer.zero_grad()
            sums += torch.cat([loss.detach()[None], agreement]).float()
        loss, *agreement = (accelerator.reduce(sums, "sum") / count).tolist()
        self.step += 1
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} at step {self.step}; a lower lr or clip_at may help")
        tokens = int(self.documents.lengths_of(batch).sum())
        return {"step": self.step, "loss": loss, "top1": agreement, "lr": rate, "tokens": tokens}

    def loss(self, indices: np.ndarray, batch: np.ndarray) -> tuple[Tensor, Tensor]:
        """Sums over the learned positions of some documents; of none where this process's share is empty."""
        empty = len(indices) == 0
        indices = batch[:1] if empty else indices
        tokens, learned = (torch.from_numpy(a).to(self.accelerator.device) for a in self.documents.collate(indices))
        if empty:
            learned = torch.zeros_like(learned)
        features = self.features(indices, tokens).to(self.accelerator.device)
        if self.accelerator.mixed_precision == "no":
            features = features.to(next(iter(self.trained)).dtype)
        noise = None
        if self.config.objective.noise:
            lengths = self.documents.lengths_of(indices)
            seed = self.config.seed * 1_000_003 + self.step
            noise = feature_noise(indices, lengths, features, self.config.objective.noise, seed)
        with self.accelerator.autocast():
            return self.model(features, tokens, learned, noise)

    # Evaluation ----------------------------------------------------------------------------------------------

    def current_head(self) -> DraftHead | None:
        """A copy of the head in float32 on the main process; None on others. All processes must call it."""
        state = self.accelerator.get_state_dict(self.model)
        if not self.accelerator.is_main_process:
            return None
        head = self.head_kind(self.head_config, bias=self.head_bias)
        head.config._attn_implementation = "sdpa"
        share = self.ends.embed_tokens if self.target is None else self.target.embeddings_on(self.target.output_device)
        head.share_embeddings(share)
        head.load_state_dict({name.removeprefix("head."): value.to("cpu") for name, value in state.items()})
        return head.eval()

    def evaluate(self, logs: Logs, head: DraftHead | None = None) -> dict[str, float] | None:
        """Estimated tau of each rule on held-out text; the best head so far is kept. None but on the main process.

        Args:
            head: the present one; None: taken from the model, for which all processes must call.
        """
        head = head or self.current_head()
        if head is None or self.target is None:
            return None
        head.to(self.target.output_device, self.target.dtype)
        taus = estimate_tau(
            self.target, head, self.eval_documents, self.eval_indices.tolist(), self.config.rules,
            self.config.tree_config,
        )
        if taus["exact"] > self.best_tau:
            self.best_tau = taus["exact"]
            self.save_head(head, "best", taus)
        logs.write("eval", {"step": self.step, "tau": taus})
        self.accelerator.log({f"tau/{name}": tau for name, tau in taus.items()}, step=self.step)
        log.info("step %d tau %s", self.step, ", ".join(f"{name} {tau:.3f}" for name, tau in taus.items()))
        return taus

    def save_head(self, head: DraftHead, name: str, taus: dict[str, float] | None) -> None:
        part = self.output / f"{name}.part"
        shutil.rmtree(part, ignore_errors=True)
        save_head(head, part, dtype=torch.bfloat16 if self.config.target_dtype == "bfloat16" else torch.float32)
        (part / "estimate.json").write_text(json.dumps({"step": self.step, "tau": taus}, indent=1) + "\n")
        shutil.rmtree(self.output / name, ignore_errors=True)
        part.rename(self.output / name)

    # States --------------------------------------------------------------------------------------------------

    def save_state(self) -> None:
        """Everything that is needed to continue bit by bit, complete or not there at all."""
        accelerator, states = self.accelerator, self.output / "states"
        part, final = states / f"step-{self.step}.part", states / f"step-{self.step}"
        if final.exists():
            return
        if accelerator.is_main_process:
            shutil.rmtree(part, ignore_errors=True)
            states.mkdir(parents=True, exist_ok=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(part))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            record = {"step": self.step, "config": comparable(self.config)}
            (part / "run.json").write_text(json.dumps(record, indent=1) + "\n")
            part.rename(final)
            for old in saved_states(self.output)[: -self.config.keep]:
                shutil.rmtree(old)

    def resume(self) -> None:
        """Continue from the last complete state, where there is one.

        Raises:
            ValueError: it was made with other settings.
        """
        states = saved_states(self.output)
        self._same_everywhere(len(states))
        if not states:
            return
        record = json.loads((states[-1] / "run.json").read_text())
        changed = [k for k, v in comparable(self.config).items() if record["config"].get(k) != v]
        if changed:
            raise ValueError(
                f"{self.output} holds a run with another {', '.join(changed)}; choose another output or delete it"
            )
        self.accelerator.load_state(str(states[-1]))
        self.step = record["step"]
        # A state is saved before its step is evaluated.
        evaluated = read_lines(self.output / "eval.jsonl", repair=False)
        self.best_tau = max((line["tau"]["exact"] for line in evaluated if line["step"] <= self.step), default=0.0)
        log.info("continuing at step %d", self.step)

    def _same_everywhere(self, value: int) -> None:
        """Raise unless all processes see the same states: several machines need a shared output folder."""
        if self.accelerator.num_processes > 1:
            seen = self.accelerator.gather(torch.tensor([value], device=self.accelerator.device))
            if int(seen.min()) != int(seen.max()):
                raise ValueError(f"{self.output} is not the same folder for all machines; a shared one is needed")


def comparable(config: TrainingConfig) -> dict:
    """The settings that a resumed run has to share."""
    free = ("output", "evaluate", "save_every", "keep", "log_every", "eval_every", "eval_thresholds", "tracker",
            "decode_prompts", "decode_tokens")
    values = json.loads(json.dumps(dataclasses.asdict(config)))
    return {name: value for name, value in values.items() if name not in free}


def saved_states(output: Path) -> list[Path]:
    """Complete states, oldest first."""
    found = [path for path in (output / "states").glob("step-*") if (path / "run.json").is_file()]
    return sorted((p for p in found if p.suffix != ".part"), key=lambda path: int(path.name.removeprefix("step-")))


class Logs:
    """`train.jsonl` and `eval.jsonl` of a run, on the main process; a resumed run drops the lines behind its state."""

    def __init__(self, output: Path, step: int, enabled: bool) -> None:
        self.output, self.enabled = output, enabled
        for name in ("train", "eval"):
            path = output / f"{name}.jsonl"
            if enabled and path.exists():
                write_lines(path, [record for record in read_lines(path) if record["step"] <= step])

    def write(self, name: str, record: dict) -> None:
        if self.enabled:
            append_lines(self.output / f"{name}.jsonl", [record])


def make_accelerator(config: TrainingConfig, cpu: bool) -> Accelerator:
    """Accelerate's side of the run, told what the settings say.

    Raises:
        ValueError: settings that accelerate's configuration contradicts or that sharding does not offer.
    """
    tracker = None if config.tracker == "none" else config.tracker
    if tracker and tracker not in [str(name) for name in get_available_trackers()]:
        if tracker == "wandb":
            raise ValueError("tracker wandb is asked for, and the package wandb is not installed")
        log.warning("the package %s is not installed: the run is logged to train.jsonl and eval.jsonl only", tracker)
        tracker = None
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision, gradient_accumulation_steps=config.gradient_accumulation, cpu=cpu,
        log_with=tracker, project_dir=config.output if tracker else None,
        # The main process evaluates while the others wait.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=datetime.timedelta(hours=6))],
    )
    if accelerator.gradient_accumulation_steps != config.gradient_accumulation:
        raise ValueError(
            f"gradient_accumulation is {config.gradient_accumulation} here and "
            f"{accelerator.gradient_accumulation_steps} in accelerate's configuration"
        )
    sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    if sharded and config.clip == "value":
        raise ValueError(f"clip: value does not work under {accelerator.distributed_type.value}; use clip: norm")
    if config.device_map and accelerator.num_processes > 1:
        raise ValueError("device_map spreads the target over all devices: launch one process, or use offline features")
    if accelerator.state.deepspeed_plugin is not None:
        accelerator.state.deepspeed_plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": 1,  # asked for where no data loader is prepared
            "gradient_clipping": config.clip_at,
        }
    return accelerator


def train(config: TrainingConfig, *, cpu: bool = False) -> Path:
    """Train to the end; returns the folder of the finished head.

    Args:
        cpu: keep off an accelerator that is there.
    """
    output = Path(config.output)
    accelerator = make_accelerator(config, cpu)
    output.mkdir(parents=True, exist_ok=True)
    run = Run(config, accelerator)
    run.check_evaluation()
    run.resume()
    main = accelerator.is_main_process
    if main:
        log.info("%d process(es) on %s", accelerator.num_processes, accelerator.device.type)
    logs = Logs(output, run.step, main)
    if accelerator.log_with:
        accelerator.init_trackers("eagle_fsd", config={k: str(v) for k, v in comparable(config).items()})
    stop = StopRequest()
    bar = tqdm(total=run.steps, initial=run.step, desc="draft head", unit="step", disable=None if main else True,
               mininterval=2)
    started, tokens = time.perf_counter(), 0
    try:
        while run.step < run.steps:
            record = run.train_step()
            tokens += record["tokens"]
            record["tokens_per_second"] = round(tokens / (time.perf_counter() - started), 1)
            logs.write("train", record)
            bar.update()
            if run.step % config.log_every == 0:
                bar.set_postfix(loss=f"{record['loss']:.3f}", top1=f"{record['top1'][0]:.3f}",
                                tok_s=f"{record['tokens_per_second']:.0f}", refresh=False)
                accelerator.log({"loss": record["loss"], "lr": record["lr"],
                                 **{f"top1/step{i + 1}": a for i, a in enumerate(record["top1"])}}, step=run.step)
            stopping = stop.anywhere(accelerator)
            if run.step % config.save_every == 0 or run.step == run.steps or stopping:
                run.save_state()
            if stopping:
                raise KeyboardInterrupt
            if config.evaluate and run.step % config.eval_every == 0 and run.step < run.steps:
                run.evaluate(logs)
                accelerator.wait_for_everyone()
    finally:
        bar.close()
        stop.restore()
    finish(run, logs)
    accelerator.end_training()
    return output / "head"


def finish(run: Run, logs: Logs) -> None:
    """Save the head and, where there is to be an evaluation, decode with it for real and write its card."""
    head = run.current_head()
    if head is None:
        return
    directory = run.output / "head"
    if run.target is None or not run.config.evaluate:
        run.save_head(head, "head", None)
        log.info("the head is in %s; evaluate=false: nothing was measured", directory)
        return
    head.to(run.target.output_device, run.target.dtype)
    config, indices = run.config, run.eval_indices.tolist()
    evaluated = read_lines(run.output / "eval.jsonl")
    taus = evaluated[-1]["tau"] if evaluated and evaluated[-1]["step"] == run.step else run.evaluate(logs, head)
    run.save_head(head, "head", taus)
    decoded = measure(run.target, head, run.eval_documents, indices, config.rules, config.tree_config,
                      prompts=config.decode_prompts, new_tokens=config.decode_tokens)
    write_card(directory, config, run.steps, len(run.train_indices), taus, decoded)
    log.info("the head is in %s", directory)


class StopRequest:
    """Ctrl-C and SIGTERM ask for a stop after the present step; a second one stops at once."""

    def __init__(self) -> None:
        self.asked = False
        self.before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self.before[number] = signal.signal(number, self._ask)
            except ValueError:  # not in the main thread: whoever runs there handles signals
                break

    def _ask(self, number: int, frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def anywhere(self, accelerator: Accelerator) -> bool:
        """Whether any process was asked, the same answer on all."""
        if accelerator.num_processes == 1:
            return self.asked
        return bool(accelerator.reduce(torch.tensor(float(self.asked), device=accelerator.device), "sum") > 0)

    def restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, type=Path, help="YAML or JSON file with settings of TrainingConfig")
    parser.add_argument("overrides", nargs="*", metavar="name=value", help="settings that replace the file's")
    parser.add_argument("--wandb", action="store_true", help="log to Weights & Biases instead of TensorBoard")
    parser.add_argument("--cpu", action="store_true", help="keep off a GPU that is there")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    overrides = [*args.overrides, "tracker=wandb"] if args.wandb else args.overrides
    return exit_status(
        "train_draft_head", lambda: train(read_config(args.config, overrides), cpu=args.cpu),
        (ValueError, OSError, ImportError, FloatingPointError), stopped="stopped; the same command continues",
    )


if __name__ == "__main__":
    sys.exit(main())

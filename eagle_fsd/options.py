"""Every option of decoding and of loading: its name, default, meaning and check, once.

`generate`, `custom_generate`, `Chat`, the command line and the lm-evaluation-harness take theirs from here. The
docstrings are what `--help` says. Nothing here imports torch, so that `--help` is quick.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING

from .checks import check_placement, require_bool, require_integer, require_number
from .drafting.config import TreeConfig
from .measure.promises import parse_promise
from .models.implementations import IMPLEMENTATIONS

if TYPE_CHECKING:
    from typing_extensions import Self

ELSEWHERE = {"max_tokens": "max_new_tokens=", "quality": "eagle-fsd calibrate"}
LEAST_TEMPERATURE = 1e-6  # below, quotients leave the range of float32


class Options:
    """What the dataclasses of options share."""

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Self:
        """From values by name; those of other options are left out.

        Raises:
            TypeError, ValueError: a value that cannot be accepted.
        """
        return cls(**{name: given[name] for name in names_of(cls) if name in given})


@dataclass(frozen=True)
class SamplingOptions(Options):
    """How tokens are drawn, and where an answer ends.

    Args:
        max_new_tokens: tokens of an answer, never exceeded; lowered where the target has fewer positions left.
        temperature: 0 is greedy; otherwise sampling.
        top_p: sample from the most likely tokens that together have this probability; 1: off.
        top_k: sample from so many of the most likely tokens; 0: off.
        min_p: leave out tokens below this share of the most likely one's probability; 0: off.
        repetition_penalty: as in `model.generate`; 1: off.
        min_new_tokens: no end token before so many tokens.
        ignore_eos: go on past end tokens.
        seed: of the sampling noise; None draws one, reported in `out.seed`. With one seed, plain decoding, `exact`
            and any rule at its lossless end give the same tokens. For a batch a list of seeds, one for each prompt; one
            seed is that of the first prompt, and those after it get the numbers that follow.
        stop: strings that end the answer; not part of its text.
        stop_token_ids: further tokens that end it.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    ignore_eos: bool = False
    seed: int | Sequence[int] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        require_integer("max_new_tokens", self.max_new_tokens, 1)
        require_number("temperature", self.temperature, f"0 (greedy) or a number >= {LEAST_TEMPERATURE:g}",
                       lambda x: x == 0 or LEAST_TEMPERATURE <= x < math.inf)
        require_number("top_p", self.top_p, "a number in (0, 1]", lambda x: 0 < x <= 1)
        require_number("min_p", self.min_p, "a number in [0, 1]", lambda x: 0 <= x <= 1)
        require_number("repetition_penalty", self.repetition_penalty, "a positive number", lambda x: 0 < x < math.inf)
        require_integer("top_k", self.top_k, 0)
        require_integer("min_new_tokens", self.min_new_tokens, 0)
        require_bool("ignore_eos", self.ignore_eos)
        for seed in self.seed if isinstance(self.seed, (list, tuple)) else [self.seed]:
            if seed is not None or isinstance(self.seed, (list, tuple)):
                require_integer("seed", seed, 0)
                if seed >= 2**63:
                    raise ValueError(f"seed must be below 2**63, got {seed}")
        self._check_stops()

    def _check_stops(self) -> None:
        if not (self.stop is None or isinstance(self.stop, (str, list, tuple))):
            raise TypeError(f"stop must be a string or a list of strings, got {self.stop!r}")
        for string in self.stop_strings:
            if not isinstance(string, str) or not string:
                raise ValueError(f"stop must hold non-empty strings, got {string!r}")
        ids = self.stop_token_ids
        if ids is not None and (not isinstance(ids, Iterable) or isinstance(ids, (str, bytes))):
            raise TypeError(f"stop_token_ids must be a sequence of token ids, got {ids!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def shapes_distribution(self) -> bool:
        """Whether more than the temperature shapes the distribution that tokens are drawn from."""
        return bool(self.top_k or self.top_p < 1 or self.min_p or self.repetition_penalty != 1)


@dataclass(frozen=True)
class AcceptanceOptions(Options):
    """Which drafted tokens are kept, and the tree that they are drafted in.

    Args:
        acceptance: a rule's name (see `eagle_fsd.RULES`), several joined by + of which the first decides and the gates
            of the others veto (fsd+fly), a rule object, or a function from a `Verification` to log-weights [B, N, V].
        threshold: the rule's dial. None: for fsd the value of the strictest promise about accuracy that the head is
            calibrated for at this target, dtype, temperature and tree, where nothing else shapes the distribution
            (top_p, top_k, min_p, repetition_penalty, logits_processor); else 0 (lossless for fsd, tilt and lenience).
        divergence: for the rules that gate on one, default js: kl, reverse_kl, js, tv, js_fsd_code, or a form on the
            target's top k tokens such as js_top32.
        gate_threshold: the dial of the gate behind a +, for several a list of theirs; None: the gate's default, where
            it has one (docs/acceptance.md).
        quality: a promise that the head is calibrated for (`eagle-fsd calibrate`), such as "accuracy_drop<=1%"; it
            chooses rule and threshold.
        budget: nats that fuzzy acceptance may cost in this answer: summed KL to the target when sampling, summed
            log-probability regret when greedy. When it is spent, or when the text starts to repeat, decoding is exact
            for the rest; `out.stats` says where. 0: exact; inf: only repetition counts.
        tree: size of the draft tree; None: as the model was loaded for (`load(tree=)`).
    """

    acceptance: str = "fsd"  # or a Rule, or a function
    threshold: float | None = None
    divergence: str | None = None
    gate_threshold: float | Sequence[float] | None = None
    quality: str | None = None
    budget: float | None = None
    tree: TreeConfig | None = None

    def __post_init__(self) -> None:
        if self.quality is not None:
            dials = (self.threshold, self.divergence, self.gate_threshold)
            if self.acceptance != "fsd" or any(dial is not None for dial in dials):
                raise ValueError(f"quality={self.quality!r} chooses the rule: leave acceptance=, threshold=, "
                                 "divergence= and gate_threshold= out")
            parse_promise(self.quality)
        if self.budget is not None:
            if isinstance(self.budget, bool) or not isinstance(self.budget, Real):
                raise TypeError(f"budget must be a number of nats, got {self.budget!r}")
            if not self.budget >= 0:
                raise ValueError(f"budget must be at least 0 nats, got {self.budget!r}")
        if not (self.tree is None or isinstance(self.tree, TreeConfig)):
            raise TypeError(f"tree must be a TreeConfig or None (what load(tree=...) said), got {self.tree!r}")

    @property
    def rule(self) -> dict[str, object]:
        """The arguments of `make_rule`."""
        return {"rule": self.acceptance, "threshold": self.threshold, "divergence": self.divergence,
                "gate_threshold": self.gate_threshold}


@dataclass(frozen=True)
class LoadOptions(Options):
    """Which pair is loaded, where to, and in what form.

    Args:
        target: directory, hub id or GGUF file (dequantised once into the user's cache); None, with no draft:
            SmolLM2-135M-Instruct with its bundled head, where the package that holds it is installed
            (docs/install.md), else a small bundled pair, with a warning.
        draft: directory or hub id of its draft head; None: the one that is known for the target (`eagle-fsd heads`),
            with a warning unless it is bundled.
        dtype: "auto", a torch dtype or its name. "auto" is the checkpoint's own; on a CPU it is bfloat16 where the
            checkpoint is stored in it and the processor is faster in it, else float32.
        device: where to put both models; default: CUDA where available, else the CPU.
        device_map: placement by accelerate, instead of `device`; the head goes where the output layer is.
        quantization_config: one of `transformers`, to quantise the target with while it is loaded. A checkpoint that
            was saved quantised needs none.
        attn_implementation: "sdpa", "eager", "grouped", "split", or "auto": the fastest here, measured once; see
            docs/attention.md. Default: sdpa where the model has it, on a CPU without its copies ("grouped").
        trust_remote_code: allow a target to run code from its repository.
        tree: where `generate` is given none: "auto", the one that emits the most tokens per second on this machine,
            where there are logs to choose it by (`eagle-fsd tune`), else a default for the device; drafting pauses
            where it does not pay. The models' latency is measured for it and kept, and measured again where it turns
            out that other work had slowed the machine. None: that default, without pauses; or a `TreeConfig`.
        prepack: on a CPU, keep a second copy of bfloat16 weights in the layout that its kernels read: same results, a
            third of the time less with 1 to 16 tokens, twice the memory. Not together with compile.
    """

    target: str | Path | None = None
    draft: str | Path | None = None
    dtype: str = "auto"  # or a torch dtype
    device: str | None = None  # or a torch device
    device_map: str | dict | None = None
    quantization_config: object | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    tree: TreeConfig | str | None = "auto"
    prepack: bool = True

    def __post_init__(self) -> None:
        if self.target is None and self.draft is not None:
            raise ValueError("target= is missing: give both target= and draft=, or neither for the default pair")
        if self.attn_implementation not in (None, "auto", *IMPLEMENTATIONS):
            raise ValueError(f"attn_implementation must be None, auto or one of {', '.join(IMPLEMENTATIONS)}, got "
                             f"{self.attn_implementation!r}")
        check_placement(self.device, self.device_map, None)
        if not (self.tree is None or self.tree == "auto" or isinstance(self.tree, TreeConfig)):
            raise ValueError(f'tree must be "auto", a TreeConfig or None, got {self.tree!r}')
        require_bool("prepack", self.prepack)


# TEMP: what the founding engineer defines; replaced by that.
@dataclass(frozen=True)
class GenerateOptions(Options):
    """How tokens are drawn, where an answer ends, and which drafted tokens are kept.

    Args:
        max_new_tokens: tokens of an answer, never exceeded; lowered where the target has fewer positions left.
        temperature: 0 is greedy; otherwise sampling.
        top_p: sample from the most likely tokens that together have this probability; 1: off.
        top_k: sample from so many of the most likely tokens; 0: off.
        min_p: leave out tokens below this share of the most likely one's probability; 0: off.
        repetition_penalty: as in `model.generate`; 1: off.
        min_new_tokens: no end token before so many tokens.
        ignore_eos: go on past end tokens.
        seed: of the sampling noise; None draws one.
        stop: strings that end the answer; not part of its text.
        stop_token_ids: further tokens that end it.
        acceptance: a rule's name.
        threshold: of the rule; None: 0.
        divergence: for the rules that gate on one, default js.
        head_guard: a fuzzy token needs this share less 1 of the best token's probability.
        budget: nats of regret that fuzzy tokens of this answer may cost.
        tree: size of the draft tree; None: as the model was loaded for.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    ignore_eos: bool = False
    seed: int | Sequence[int] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    acceptance: str | object = "fsd"
    threshold: float | None = None
    divergence: str | None = None
    head_guard: float | str | None = "default"
    budget: float | None = None
    tree: TreeConfig | None = None

    def __post_init__(self) -> None:
        SamplingOptions.of(vars(self))
        AcceptanceOptions.of(vars(self))
        _ = self.rule

    @functools.cached_property
    def rule(self):
        from .acceptance import RULES, make_rule

        guard = {}
        if isinstance(self.acceptance, str) and self.acceptance in RULES and "head_guard" in RULES[
                self.acceptance].__dataclass_fields__:
            guard = {"head_guard": 0.7 if self.head_guard == "default" else self.head_guard}
        return make_rule(self.acceptance, self.threshold, self.divergence, **guard)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])


def names_of(options: type[Options]) -> list[str]:
    """The names of a dataclass of options, in its order."""
    return [field.name for field in fields(options)]

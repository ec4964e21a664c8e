"""What a training run is told: data, model, run, and everything the engine reads. No torch in here.

One file may hold it all: the keys of `trilithon.Config` (or of a DeepSpeed file) at the top, and the blocks "data",
"model" and "run" beside them. Values from the command line win over the file, the file over the trainer's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from trilithon.config import Config, Fp16
from trilithon.config.base import Count, Flag, NonNegativeReal, Positive, PositiveReal, Section, describe, dotted
from trilithon.config.naming import unknown_keys
from trilithon.config.origin import Problem, raise_if_any
from trilithon.config.root import examine
from trilithon.config.sources import read
from trilithon.errors import ConfigError
from trilithon.models.settings import GPTConfig, preset

DEFAULT_MICRO_SIZE = 8


class DataConfig(Section):
    """Which text is trained on and how it becomes tokens."""

    paths: tuple[str, ...] = ()
    """Files, folders and patterns."""
    suffixes: tuple[str, ...] = ()
    """Endings that files inside folders must have, such as ".py". Empty: any."""
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    """"bytes": every byte is a token. "bpe": a vocabulary is learnt from the data."""
    vocab_size: Positive | None = None
    """Tokens of a "bpe" vocabulary. null: 4096 for "bpe"."""
    held_out: Annotated[PositiveReal, Field(lt=1)] = 0.05
    """Share of the text that is kept from training, for validation."""
    max_tokens: Positive | None = None
    """Training tokens to stop reading at. null: all."""
    cache: Path | None = None
    """Folder of tokenised data. null: trilithon/tokens under the user's cache folder."""
    workers: Count = 0
    """Processes that load batches ahead."""


class ModelConfig(Section):
    """The shape of the model: a preset, and what is to differ from it."""

    preset: str = "tiny"
    """Name of a shape: nano, tiny, small, medium, base, large, xl."""
    num_layers: Positive | None = None
    """Blocks. null: the preset's."""
    width: Positive | None = None
    """Channels of the residual stream. null: the preset's."""
    num_heads: Positive | None = None
    """Attention heads. null: the preset's."""
    context: Positive | None = None
    """Tokens of a sequence. null: the preset's."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm."""
    activation: Literal["gelu", "swiglu"] = "gelu"
    """GELU or SwiGLU."""
    tie_embeddings: Flag = True
    """Read tokens and predict them with the same matrix."""
    experts: Count = 0
    """Feed-forward blocks to choose from in layers that have experts. 0: every layer has one block (dense)."""
    top_k: Positive = 1
    """Experts that each token goes to."""
    expert_every: Positive = 2
    """Every this many layers has experts, the last one among them."""
    ep_size: Positive | None = None
    """Ranks over which the experts of a layer are spread. null: as many as fit."""
    capacity_factor: PositiveReal | None = 1.25
    """Room of an expert in training, over what it would get at uniform load. null: nothing is ever dropped."""
    balance_coeff: NonNegativeReal = 0.01
    """Weight of the loss that keeps experts evenly loaded."""

    def shape(self, vocab_size: int) -> GPTConfig:
        """The model's full description. Raises ConfigError when its numbers do not go together."""
        given = {name: value for name, value in self.model_dump(exclude={"preset"}).items() if value is not None}
        given["capacity_factor"] = self.capacity_factor  # null says something
        return preset(self.preset, vocab_size, **given)


class RunConfig(Section):
    """How long to train, what to measure and what to leave behind."""

    steps: Positive = 300
    """Updates of the weights."""
    eval_every: Count = 100
    """Steps between two evaluations on held-out text. 0: only at the end."""
    eval_batches: Positive = 8
    """Batches of one evaluation, each of 8 sequences whatever the batch and the number of ranks, so that every run on
    this text is measured on the same sequences."""
    out: Path | None = None
    """Folder for metrics, curve and weights. null: runs/ and the time of the start."""
    overwrite: Flag = False
    """Replace the run that `out` holds."""
    save_every: Count = 0
    """Steps between two checkpoints. 0: only when a signal asks for one."""
    save_on_signal: Flag = True
    """Save before stopping on SIGINT or SIGTERM, and on SIGUSR1 without stopping. false: SIGINT stops without a
    checkpoint, and the other two keep what they mean to any process."""
    stop_within_s: Positive = 60
    """Seconds that ranks of this machine have, once asked to stop, to end their step and save."""
    resume: str | None = None
    """Folder of a run or of checkpoints to continue from, or "auto" for the one that `out` holds, if any."""
    max_restarts: Count = 0
    """Starts of all ranks of this machine after one of them failed, each from the last checkpoint."""
    sample_tokens: Count = 200
    """Tokens to generate at the end. 0: none."""
    prompt: str = ""
    """Text that the sample continues. Empty: the beginning of a document."""
    temperature: NonNegativeReal = 0.8
    """Sharpness of the sample's draws; 0 takes the likeliest token."""
    top_k: Positive | None = 40
    """Draw among this many likeliest tokens. null: all."""


class PretrainConfig(Section):
    """One training run."""

    data: DataConfig = DataConfig()
    """The text."""
    model: ModelConfig = ModelConfig()
    """The model."""
    run: RunConfig = RunConfig()
    """The run."""
    engine: Config = Config()
    """Everything the engine is told."""


EVAL_BATCH = 8  # sequences, of which `run.eval_batches` counts
_DECAYING = ("cosine", "linear", "polynomial")
_OWN: dict[str, type[Section]] = {"data": DataConfig, "model": ModelConfig, "run": RunConfig}


def load_pretrain(
    source: str | Path | Mapping[str, Any] | None = None, overrides: Mapping[str, Any] | None = None
) -> PretrainConfig:
    """Read a run's configuration and fill in the trainer's defaults.

    source: a file or dict as described above, or None. overrides: values that win, by dotted key: "data.", "model." and
    "run." for the blocks of this file, and the keys of `trilithon.Config` for the rest.
    Raises ConfigError listing what is wrong.
    """
    raw: dict[str, Any] = {}
    where = "config"
    if isinstance(source, Mapping):
        raw = dict(source)
    elif source is not None:
        raw, where = read(source)
    blocks = {name: raw.pop(name, {}) for name in _OWN}
    given = dict(overrides or {})
    own = {key: given.pop(key) for key in list(given) if key.partition(".")[0] in _OWN}
    problems: list[Problem] = []
    data, model, run = (_section(name, blocks[name], own, where, problems) for name in _OWN)
    problems += examine(raw, overrides=_without_partial_choices(given), name=where).problems
    raise_if_any(problems)
    assert isinstance(data, DataConfig) and isinstance(model, ModelConfig) and isinstance(run, RunConfig)
    if data.tokenizer == "bpe" and data.vocab_size is None:
        data = DataConfig(**{**data.model_dump(), "vocab_size": 4096})
    if run.max_restarts and not run.save_every:
        raise ConfigError(
            f"run.max_restarts={run.max_restarts} without run.save_every would begin anew after each failure: add "
            "--save-every N, the steps between two checkpoints."
        )
    if not data.paths:
        raise ConfigError("no data is given: pass --data with files, folders or patterns, or data.paths in the file.")
    engine = _engine(raw, given, run.steps, where)
    _require_folder(engine)
    model.shape(data.vocab_size or 257)  # numbers that do not go together are found before any process starts
    return PretrainConfig(data=data, model=model, run=run, engine=engine)


def _require_folder(engine: Config) -> None:
    """Found before any text is read."""
    offload = engine.offload
    if "disk" in (offload.state, offload.parameters, offload.gradients) and offload.path is None:
        raise ConfigError(
            "state is to rest on disk, and no folder is given: pass --tier-path with a folder on a local disk, or "
            "offload.path in the file."
        )


def _section(
    name: str, block: Any, overrides: Mapping[str, Any], where: str, problems: list[Problem]
) -> Section | None:
    """One of our own blocks with its overrides; None after adding its problems, under dotted keys."""
    if not isinstance(block, Mapping):
        problems.append(Problem(where, name, f"{name}: must be a block of keys, not {block!r}."))
        return None
    values, changed = dict(block), set()
    for key, value in overrides.items():
        first, _, rest = key.partition(".")
        if first == name:
            if not rest:
                text = f"{name} is a block: set one of its keys, such as {name}.{_first_key(name)}."
                problems.append(Problem("override", name, text))
                return None
            values[rest] = value
            changed.add(rest)

    def add(key: str, text: str) -> None:
        problems.append(Problem("override" if key.partition(".")[0] in changed else where, f"{name}.{key}", text))

    unknown = list(unknown_keys(values, _OWN[name]))
    for key, text in unknown:
        add(key, f"{name}.{key}: {text}")
    try:
        return _OWN[name].model_validate({key: value for key, value in values.items() if key not in dict(unknown)})
    except ValidationError as error:
        for item in error.errors():
            add(str(item["loc"][0]), describe(dotted((name, *item["loc"])), item))
        return None


def _first_key(name: str) -> str:
    return next(iter(_OWN[name].model_fields))


def _engine(raw: Mapping[str, Any], given: Mapping[str, Any], steps: int, where: str) -> Config:
    """The engine's part: what the file leaves open gets values that train a language model."""
    written = Config.load(raw, overrides=_without_partial_choices(given), name=where)
    settings: dict[str, Any] = {}
    if written.optimizer is None:
        settings.update(_optimizer(_kind(given, "optimizer"), steps))
    if written.lr_schedule is None and _kind(given, "lr_schedule") in (None, *_DECAYING):
        settings["lr_schedule"] = {
            "kind": "cosine",
            "total_steps": steps,
            "warmup_steps": max(steps // 20, 1),
            "min_ratio": 0.1,
        }
    if not isinstance(written.precision, Fp16) and "non_finite" not in written.precision.model_fields_set:
        # A small model whose gradient is not finite has diverged: skipping would hide that until the last step.
        settings["precision"] = {"kind": written.precision.kind, "non_finite": "raise"}
    if "clip_norm" not in written.model_fields_set:
        settings["clip_norm"] = 1.0
    if written.batch.micro_size is None and written.batch.global_size is None:
        settings["batch"] = {"micro_size": DEFAULT_MICRO_SIZE}
    if "keep" not in written.checkpoints.model_fields_set:
        settings["checkpoints"] = {"keep": 2}
    sinks = {"jsonl": True, "csv": True, "tensorboard": find_spec("tensorboard") is not None}
    left_open = {name: on for name, on in sinks.items() if name not in written.monitor.model_fields_set}
    if left_open:  # an empty block would replace what is written
        settings["monitor"] = left_open
    _merge(settings, _nested(given))
    return Config.load(raw, overrides=settings, name=where)


def _optimizer(kind: Any, steps: int) -> dict[str, Any]:
    """Settings of the rules that have usual ones for a language model; a warm-up takes a fifth of the run."""
    usual = {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
    warm_up = max(steps // 5, 1)
    match kind:
        case None | "adamw":
            return {"optimizer": {"kind": "adamw", **usual}}
        case "onebit_adam" | "apmsqueeze":
            return {"optimizer": {"kind": kind, **usual, "freeze_step": warm_up}}
        case "zero_one_adam":
            return {"optimizer": {"kind": kind, **usual, "var_freeze_step": warm_up}}
        case "onebit_lamb":
            return {"optimizer": {"kind": kind, "freeze_step": warm_up}}
    return {}


def _kind(given: Mapping[str, Any], block: str) -> Any:
    """The kind that overrides choose for a block, None if they leave it open."""
    return given.get(f"{block}.kind", given.get(block))


def _without_partial_choices(given: Mapping[str, Any]) -> dict[str, Any]:
    """What can be read before the defaults are known: "optimizer.lr" alone does not say which optimizer."""
    return {key: value for key, value in given.items() if key.partition(".")[0] not in ("optimizer", "lr_schedule")}


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys to nested blocks; a bare kind becomes a block, so that keys beside it can be set."""
    nested: dict[str, Any] = {}
    for key, value in sorted(flat.items(), key=lambda item: item[0].count(".")):
        *above, name = key.split(".")
        here = nested
        for part in above:
            below = here.get(part)
            here[part] = below if isinstance(below, dict) else ({"kind": below} if isinstance(below, str) else {})
            here = here[part]
        bare_kind = not above and name in ("optimizer", "lr_schedule", "precision") and isinstance(value, str)
        here[name] = {"kind": value} if bare_kind else value
    return nested


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> None:
    """`over` into `base`, block by block."""
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value

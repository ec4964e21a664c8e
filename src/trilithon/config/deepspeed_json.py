"""Reads a configuration written for DeepSpeed: each key is mapped, refused with the reason, or noted as idle.

The tables of keys are in deepspeed_keys.py and deepspeed_features.py. Unknown keys are refused (DeepSpeed skips unknown
top-level keys); keys that begin with an underscore never arrive here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Literal

from trilithon.config.base import kind_of, place, show
from trilithon.config.deepspeed_features import PIPELINE
from trilithon.config.deepspeed_keys import AUTO_IS_A_VALUE, TABLE
from trilithon.config.deepspeed_recompute import read_recompute
from trilithon.config.deepspeed_release import REMOVED, Release, removed
from trilithon.config.deepspeed_rules import Block, Code, Entry, Feature, Idle, Only, To, misfit, same, table_keys
from trilithon.config.deepspeed_types import read_optimizer, read_scheduler
from trilithon.config.naming import advice, nearest
from trilithon.config.origin import BATCH_MISSING, Draft, Source, leaves
from trilithon.config.pipeline import PipelineConfig

_CALLER = "caller's arguments"


_BOTH = ("optimizer", "pipeline")  # blocks that both formats have


def recognise(raw: Mapping[str, Any], native: Collection[str], draft: Draft) -> Literal["native", "deepspeed"]:
    """The format of a block, by its top-level keys.

    A key only one format knows speaks for that format; `optimizer` speaks for DeepSpeed when it holds `type` or
    `params`, and `pipeline` for the one that alone knows all of its keys. When no key is known, the nearest names
    decide. Keys of both formats in one block are a problem, and the format with more keys is assumed for finding
    further ones.
    """
    ours = [key for key in raw if key in native and key not in _BOTH]
    theirs = [key for key in raw if key in TABLE and key not in _BOTH]
    pipeline = raw.get("pipeline")
    if isinstance(pipeline, Mapping):
        known = [set(pipeline) <= names for names in (set(PipelineConfig.model_fields), set(PIPELINE.keys))]
        ours += ["pipeline"] if known == [True, False] else []
        theirs += ["pipeline"] if known == [False, True] else []
    optimizer = raw.get("optimizer")
    if isinstance(optimizer, Mapping) and "kind" not in optimizer and ("type" in optimizer or "params" in optimizer):
        theirs.append("optimizer")
    elif optimizer is not None:
        ours.append("optimizer")
    if ours and theirs:
        names = native_names(TABLE)
        shown = ", ".join(f"{key} ({names[key]} here)" if key in names else key for key in theirs)
        draft.problem(
            "",
            f"holds keys of trilithon ({', '.join(ours)}) and keys of DeepSpeed ({shown}), so that it is not clear "
            "how to read it; write all of it in one of the two formats",
        )
        return "deepspeed" if len(theirs) > len(ours) else "native"
    if ours or theirs:
        return "deepspeed" if theirs else "native"
    votes = [nearest(key.partition(".")[0], [*native, *TABLE]) for key in raw]
    return "deepspeed" if any(vote is not None and vote not in native for vote in votes) else "native"


def native_names(table: Mapping[str, Entry]) -> dict[str, str]:
    """DeepSpeed's name of a setting, without its blocks -> the dotted native key, for keys that are simply mapped."""
    names: dict[str, str] = {}
    for name, entry in table.items():
        if isinstance(entry, To):
            names[name] = entry.key
        elif isinstance(entry, Block):
            names.update(native_names(entry.keys))
    return names


def read_deepspeed(
    raw: Mapping[str, Any],
    draft: Draft,
    *,
    native: Collection[str] = (),
    auto: Mapping[str, Any],
    expected: Mapping[str, Any],
    release: Release,
) -> None:
    """Map a DeepSpeed block onto the native draft; what is wrong is added to the draft's problems."""
    reader = _Reader(draft, release)
    block = {key: _copied(value) for key, value in raw.items() if key not in native or key in _BOTH}
    reader.compare(block, dict(leaves(expected)))
    reader.fill_auto(block, "", {**dict(leaves(expected)), **dict(leaves(auto))})
    reader.walk(block, TABLE, "")
    reader.top_level(block)


def check_batch(draft: Draft) -> None:
    """DeepSpeed asks for the global or the micro batch size; called once overrides are in place."""
    batch = draft.values.get("batch")
    sizes = batch if isinstance(batch, Mapping) else {}
    if sizes.get("global_size") is None and sizes.get("micro_size") is None and not draft.unfinished:
        draft.problem(
            BATCH_MISSING,
            "Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided; both are missing",
        )


def _copied(value: Any) -> Any:
    return {key: _copied(below) for key, below in value.items()} if isinstance(value, Mapping) else value


class _Reader:
    """One pass over one DeepSpeed block. `supplied` holds the keys whose "auto" the caller resolved."""

    def __init__(self, draft: Draft, release: Release) -> None:
        self.draft = draft
        self.release = release
        self.supplied: set[str] = set()
        self.open: set[str] = set()  # "auto" without a value

    def source(self, key: str) -> Source:
        if key in self.supplied:
            return Source("argument", _CALLER, key)
        return Source("deepspeed", self.draft.where, key)

    def put(self, native: str, value: Any, key: str) -> None:
        """Set a native key from a DeepSpeed key."""
        self.draft.put(native, value, self.source(key))

    def derive(self, native: str, value: Any, why: str) -> None:
        """Set a native key that the file does not mention but DeepSpeed decides."""
        self.draft.put(native, value, Source("derived", self.draft.where, "", why))

    def compare(self, block: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
        """A problem for each key whose value is not the one the caller computed; a note where the file is silent."""
        for key, value in expected.items():
            found, given = _lookup(block, key)
            if not found:
                self.draft.note(key, f"the caller's arguments say {show(value)}, the file says nothing")
            elif given != "auto" and not _alike(given, value):
                self.draft.problem(
                    key,
                    f'{key}={show(given)}, but the caller\'s arguments say {show(value)}; change one, or write "auto"',
                )

    def fill_auto(self, block: dict[str, Any], prefix: str, values: Mapping[str, Any]) -> None:
        """Replace each "auto" by what the caller supplies; what is left is a problem and leaves the block."""
        if block.get("enabled") is False:
            return
        for name, value in list(block.items()):
            key = place(prefix, name)
            if isinstance(value, dict):
                self.fill_auto(value, f"{key}.", values)
            if not isinstance(value, str) or value != "auto" or key in AUTO_IS_A_VALUE or "." in place("", name):
                continue
            if key in values and values[key] != "auto":
                block[name] = values[key]
                self.supplied.add(key)
                continue
            del block[name]
            self.open.add(key)
            self.draft.unfinished = True
            self.draft.problem(
                key,
                f'{key}="auto": nothing supplies its value; write one, leave the key out, or pass '
                f'auto={{"{key}": ...}} (on the command line: trilithon check --auto {key}=VALUE)',
            )

    def walk(self, block: Mapping[Any, Any], table: Mapping[str, Entry], prefix: str) -> None:
        """Apply the entry of each key of a block."""
        for name, value in block.items():
            key = place(prefix, name)
            entry = table.get(name) if isinstance(name, str) else None
            if entry is None:
                self.unknown(name, prefix, table)
            else:
                self.apply(key, value, entry)

    def unknown(self, name: Any, prefix: str, table: Mapping[str, Entry]) -> None:
        key = place(prefix, name)
        if not isinstance(name, str):
            self.draft.problem(key, f"{key}: a key must be text, not {kind_of(name)}")
            return
        everywhere = list(table_keys(TABLE))
        if not prefix and "." in name and name.partition(".")[0] in TABLE:
            self.draft.note(key, "no effect, as in DeepSpeed: a key with dots is not a key inside a block")
            return
        here = list(table) if len(table) <= 20 else []
        text = advice(name, prefix, list(table), everywhere)
        if text.startswith("known here") and not here:
            text = "DeepSpeed has no such key; begin its name with an underscore to carry a key of your own"
        self.draft.problem(key, f"{key}: unknown key; {text}")

    def apply(self, key: str, value: Any, entry: Entry) -> None:
        """What one key does: map, note, or refuse."""
        match entry:
            case To():
                if value is None:
                    self.draft.note(key, "no effect: null leaves the default in place")
                    return
                already = self.draft.sources.get(entry.key)
                if already is not None and already.key != key:
                    self.draft.problem(key, f"{key}: {already.key} sets the same thing; keep one of the two")
                    return
                self.put(entry.key, entry.convert(value) if entry.convert else value, key)
            case Idle():
                wrong = misfit(value, entry.kind)
                if wrong:
                    self.draft.problem(key, f"{key}={show(value)}: {wrong}")
                else:
                    self.draft.note(key, f"no effect: {entry.why}")
            case Only():
                if not any(same(value, allowed) for allowed in entry.values):
                    self.draft.problem(key, f"{key}={show(value)}: {entry.why}")
                elif not self.gone(key):
                    self.draft.note(key, f"no effect: {show(value)} is how it is here in any case")
            case Block():
                self.block(key, value, entry)
            case Feature():
                self.feature(key, value, entry)
            case Code():
                pass

    def block(self, key: str, value: Any, entry: Block) -> None:
        """A block of keys; while its switch is off its keys are only checked for spelling."""
        if value is None:
            return
        if key == "zero_optimization" and isinstance(value, bool):
            self.put("zero.stage", int(value), key)
            self.draft.note(key, f'an old form; write {{"stage": {int(value)}}}')
            return
        if not isinstance(value, Mapping):
            self.draft.problem(key, f"{key}={show(value)} ({kind_of(value)}): must be a block of keys")
            return
        if entry.switch is None:
            self.walk(value, entry.keys, f"{key}.")
            return
        switch = value.get(entry.switch, False)
        if not isinstance(switch, bool):
            name = f"{key}.{entry.switch}"
            self.draft.problem(name, f"{name}={show(switch)} ({kind_of(switch)}): must be true or false")
        if switch:
            self.walk(value, entry.keys, f"{key}.")
            return
        for name in value:
            if name not in entry.keys:
                self.unknown(name, f"{key}.", entry.keys)
            elif name != entry.switch:
                self.draft.note(f"{key}.{name}", f"no effect, because {key}.{entry.switch} is not true")

    def gone(self, key: str) -> bool:
        """Whether the release in force raises at this key; then it is a problem."""
        if self.release != "0.19" or key not in REMOVED:
            return False
        self.draft.problem(key, removed(key))
        return True

    def feature(self, key: str, value: Any, entry: Feature) -> None:
        if entry.on(value):
            self.draft.problem(key, f"{key}: {entry.what} is not in this version; {entry.off}")
        elif not self.gone(key):
            self.draft.note(key, "no effect: it is off")
        if entry.keys is not None and isinstance(value, Mapping):
            for name in value:
                if name not in entry.keys:
                    self.unknown(name, f"{key}.", entry.keys)

    def top_level(self, block: Mapping[str, Any]) -> None:
        """The keys that are read together with others, and what DeepSpeed decides for keys left out."""
        self.precision(block)
        self.printing(block)
        self.monitors(block)
        read_recompute(self, block.get("activation_checkpointing"))
        self.parameter_folder(block.get("zero_optimization"))
        self.pinning(block.get("zero_optimization"))
        read_optimizer(self, block.get("optimizer"))
        read_scheduler(self, block.get("scheduler"))
        if block.get("gradient_clipping") is None and "gradient_clipping" not in self.open:
            clip = 1.0 if self.release == "0.19" else 0.0
            self.derive(
                "clip_norm", clip, f"gradient_clipping is absent, which means {clip} in DeepSpeed {self.release}"
            )

    def precision(self, block: Mapping[str, Any]) -> None:
        """Exactly one number format, and the rules of DeepSpeed's loss scale."""
        on = [name for name in ("fp16", "bf16", "bfloat16") if _is_on(block.get(name))]
        if len(on) > 1:
            self.draft.problem(on[0], f"{' and '.join(f'{name}.enabled' for name in on)} are both true; keep one")
        kind = "fp32" if not on else "fp16" if on[0] == "fp16" else "bf16"
        if on:
            self.put("precision.kind", kind, f"{on[0]}.enabled")
        wanted = block.get("data_types")
        wanted = wanted.get("param_dtype") if isinstance(wanted, Mapping) else None
        if wanted is not None:
            entry = TABLE["communication_data_type"]
            assert isinstance(entry, To) and entry.convert is not None
            if entry.convert(wanted) != kind:
                self.draft.problem(
                    "data_types.param_dtype",
                    f"data_types.param_dtype={show(wanted)}, but the number format in force is {kind}; enable the "
                    "block of that format, or leave param_dtype out",
                )
            else:
                self.draft.note("data_types.param_dtype", f"no effect: {kind} is in force already")
        if kind == "fp16":
            self.loss_scale(block["fp16"])

    def loss_scale(self, fp16: Mapping[str, Any]) -> None:
        if same(fp16.get("loss_scale", 0), 0) or fp16.get("loss_scale") is None:
            self.derive("precision.max_scale", 2.0**127, "DeepSpeed sets no upper limit, and fp32 ends here")
            self.derive("precision.give_up_after", 1, "DeepSpeed stops at the first overflow at min_loss_scale")

    def printing(self, block: Mapping[str, Any]) -> None:
        every = block.get("steps_per_print", 10)
        if every is None or (isinstance(every, float) and math.isinf(every)):
            self.put("monitor.quiet", True, "steps_per_print")
        elif "steps_per_print" in block:
            self.put("monitor.every", every, "steps_per_print")

    def parameter_folder(self, zero: Any) -> None:
        """Both offload blocks of DeepSpeed name a folder; here all that rests on disk shares one."""
        block = zero.get("offload_param") if isinstance(zero, Mapping) else None
        path = block.get("nvme_path") if isinstance(block, Mapping) else None
        key, other = "zero_optimization.offload_param.nvme_path", self.draft.sources.get("offload.path")
        if path is None:
            return
        if other is None:
            self.put("offload.path", path, key)
        elif dict(leaves(self.draft.values)).get("offload.path") != path:
            self.draft.problem(key, f"{key}={show(path)}, and {other.key} names another folder; keep one of the two")

    def pinning(self, zero: Any) -> None:
        """The release's default of `pin_memory`, which has no effect here."""
        default = "true" if self.release == "0.19" else "false"
        for name in ("offload_param", "offload_optimizer"):
            block = zero.get(name) if isinstance(zero, Mapping) else None
            if isinstance(block, Mapping) and "pin_memory" not in block and block.get("device") not in (None, "none"):
                key = f"zero_optimization.{name}.pin_memory"
                self.draft.note(
                    key,
                    f"left out, which means {default} in DeepSpeed {self.release}; no effect: buffers are locked "
                    "whenever there is an accelerator that copies from them",
                )

    def monitors(self, block: Mapping[str, Any]) -> None:
        """tensorboard and csv_monitor each name a folder; here all sinks share one."""
        folder: str | None = None
        for name, native in (("tensorboard", "tensorboard"), ("csv_monitor", "csv")):
            sink = block.get(name)
            if not isinstance(sink, Mapping):
                continue
            on = sink.get("enabled", False)
            if on is not True:
                if not isinstance(on, bool):
                    self.draft.problem(f"{name}.enabled", f"{name}.enabled={show(on)}: must be true or false")
                self.draft.note(name, "no effect: it is off")
                continue
            self.put(f"monitor.{native}", True, f"{name}.enabled")
            parts = [sink.get("output_path", ""), sink.get("job_name", "DeepSpeedJobName")]
            for part, key in zip(parts, ("output_path", "job_name")):
                if part is not None and not isinstance(part, str):
                    self.draft.problem(f"{name}.{key}", f"{name}.{key}={show(part)} ({kind_of(part)}): must be text")
            path = "/".join(part.rstrip("/") or "/" for part in parts if isinstance(part, str) and part)
            if folder is None:
                folder = path
                self.put("monitor.folder", path, f"{name}.output_path")
            elif path != folder:
                self.draft.note(name, f"its folder {show(path)} has no effect: all records go to {show(folder)}")


def _is_on(block: Any) -> bool:
    return isinstance(block, Mapping) and block.get("enabled") is True


def _lookup(block: Mapping[str, Any], key: str) -> tuple[bool, Any]:
    """(is it there, the value) of a dotted key."""
    here: Any = block
    for name in key.split("."):
        if not isinstance(here, Mapping) or name not in here:
            return False, None
        here = here[name]
    return True, here


def _alike(given: Any, value: Any) -> bool:
    if isinstance(given, (list, tuple)) and isinstance(value, (list, tuple)):
        return list(given) == list(value)
    return same(given, value)

"""Which layer is cut how: a plan from the user, from the model itself, or found by the names of its layers.

    {"blocks.*.attention.qkv": "column:3", "blocks.*.attention.out": "row", "embedding": "vocabulary", "head": "logits"}

    style       layer            what each rank holds, and what leaves it
    column      product          a part of the output features; they stay cut, for a row product to read
    row         product          a part of the input features; the sum over ranks leaves it
    row_split   product          as row, of an input that is whole: each rank takes its part
    gathered    product          a part of the output features; all of them leave it
    vocabulary  embedding        a part of the rows
    logits      product          a part of the vocabulary; left to the model's TokenLoss if it has one, else as gathered
    summed      any              everything; used on cut tensors (norms of single heads), so gradients are summed
    tokens      any              everything; with tensor.cut_norms a part of its tokens leaves it (position embeddings)
    whole       any              everything, as without an entry

`column:3` is a matrix that holds three equal ones, `column:64,16,16` one that holds three of those sizes; each is cut
by itself. A model's own `tp_plan`, as Hugging Face models have it, may use that library's words for styles.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from trilithon.errors import ConfigError
from trilithon.parallel.pipeline.layers import Elsewhere, is_part

STYLES = ("column", "row", "row_split", "gathered", "vocabulary", "logits", "summed", "tokens", "whole")
_ANY_LAYER = ("summed", "tokens", "whole")

# Hugging Face's words. What is not here (expert and sequence styles) is refused by name.
_FOREIGN = {
    "colwise": "column",
    "rowwise": "row",
    "rowwise_split_input": "row_split",
    "replicated_with_grad_allreduce": "summed",
    "replicate": "whole",
    "colwise_rep": "gathered",
    "colwise_gather_output": "gathered",
    "embedding_rowwise": "vocabulary",
    "packed_colwise": "column:2",
}

_FUSED = {"qkv": 3, "c_attn": 3, "qkv_proj": 3, "wqkv": 3, "Wqkv": 3, "gate_up_proj": 2}
_COLUMN = frozenset({
    *("q", "k", "v", "query", "key", "value", "q_proj", "k_proj", "v_proj", "wq", "wk", "wv"),
    *("q_lin", "k_lin", "v_lin", "up", "gate", "up_proj", "gate_proj", "fc1", "c_fc", "fc_in", "w1", "w3", "wi"),
    *("wi_0", "wi_1", "lin1", "linear1", "query_key_value", "dense_h_to_4h", "intermediate.dense", *_FUSED),
})  # fmt: skip
_ROW = frozenset({
    *("out", "o", "out_proj", "o_proj", "wo", "c_proj", "attention_out", "out_lin", "self_attention.dense"),
    *("attention.dense", "output.dense", "down", "down_proj", "fc2", "fc_out", "dense_4h_to_h"),
    *("w2", "lin2", "linear2"),
})  # fmt: skip
_HEAD_NORM = frozenset({"q_norm", "k_norm", "query_norm", "key_norm", "q_layernorm", "k_layernorm", "q_ln", "k_ln"})
_EMBEDDING = frozenset({
    *("embedding", "tokens", "token_embedding", "wte", "embed_tokens", "word_embeddings", "word_embedding"),
    *("tok_embeddings", "embed_in"),
})  # fmt: skip
_HEAD = frozenset({"head", "lm_head", "output", "embed_out", "decoder"})
_HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads")
_KEY_HEADS = ("num_kv_heads", "num_key_value_heads", "n_kv_heads", "n_head_kv")
# Attributes of attention modules that count what is cut: divided with it.
COUNTS = (*_HEADS, *_KEY_HEADS, "all_head_size", "split_size")


@dataclass(frozen=True, slots=True)
class Step:
    """One layer of the plan. blocks: sizes of the matrices that it holds side by side; empty for one."""

    name: str
    module: nn.Module
    style: str
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """own_words: it was written for this library, so it may be used with cut norms."""

    steps: tuple[Step, ...]
    own_words: bool


def make_plan(model: nn.Module, given: Mapping[str, str] | None = None) -> Plan:
    """The user's plan, else the model's `tp_plan`, else one found by names.

    Raises ConfigError for a pattern that matches nothing, a style that does not exist or does not fit its layer, and a
    model in which nothing to cut is found.
    """
    declared = getattr(model, "tp_plan", None)
    written = given or (declared if isinstance(declared, Mapping) and declared else None)
    source = "tensor.plan" if given else f"{type(model).__name__}.tp_plan"
    if written is not None:
        steps = tuple(_from_patterns(model, written, source))
        return Plan(_with_ties(model, steps), not any(word in _FOREIGN for word in written.values()))
    found = tuple(find_steps(model))
    if not any(step.style in ("column", "row") for step in found) and not is_part(model):
        raise ConfigError(
            f"no layer of {type(model).__name__} was recognised as cut over tensor ranks. Give tensor.plan, such as "
            '{"blocks.*.up": "column", "blocks.*.down": "row"}, or set mesh.tensor to 1.'
        )
    return Plan(_with_ties(model, found), False)


def rows_width(module: nn.Module) -> tuple[int, int]:
    """(input features, output features) of a product: nn.Linear, or GPT-2's transposed one."""
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    out, into = weight.shape[::-1] if is_transposed(module) else weight.shape
    return int(into), int(out)


def is_product(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Hugging Face's Conv1D: a linear layer whose weight is [input, output]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_lookup(module: nn.Module) -> bool:
    return type(module).forward is nn.Embedding.forward


def _from_patterns(model: nn.Module, written: Mapping[str, str], source: str) -> Iterator[Step]:
    modules = {name: module for name, module in model.named_modules() if name and not isinstance(module, Elsewhere)}
    taken: dict[str, str] = {}
    for pattern, word in written.items():
        style, _, sizes = _FOREIGN.get(word, word).partition(":")
        if style not in STYLES:
            close = difflib.get_close_matches(style, [*STYLES, *_FOREIGN], n=1)
            meant = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(
                f"{source}: {pattern!r} is to be cut as {word!r}, which does not exist here; {meant}there are "
                f"{', '.join(STYLES)}. Leave a layer out to keep it whole on every rank."
            )
        matches = [name for name in modules if fnmatch.fnmatchcase(name, pattern)]
        if not matches and not is_part(model):
            close = difflib.get_close_matches(pattern, modules, n=1)
            meant = f"; did you mean {close[0]!r}?" if close else "."
            raise ConfigError(f"{source}: {pattern!r} matches no module of {type(model).__name__}{meant}")
        for name in matches:
            if taken.setdefault(name, word) != word:
                raise ConfigError(f"{source}: {name!r} is cut both as {taken[name]!r} and as {word!r}; keep one.")
            _require_fit(name, modules[name], style, source)
            if style != "whole":
                yield Step(name, modules[name], style, _block_sizes(name, modules[name], sizes, source))


def _require_fit(name: str, module: nn.Module, style: str, source: str) -> None:
    fits = style in _ANY_LAYER or (is_lookup if style == "vocabulary" else is_product)(module)
    if not fits:
        wanted = "torch.nn.Embedding" if style == "vocabulary" else "torch.nn.Linear"
        raise ConfigError(
            f"{source}: {name!r} is to be cut as {style!r}, but {type(module).__name__} does not compute as {wanted} "
            "does. Leave it out, or compute with a layer that does."
        )


def _block_sizes(name: str, module: nn.Module, sizes: str, source: str) -> tuple[int, ...]:
    if not sizes:
        return ()
    out = rows_width(module)[1]
    parts = [int(size) for size in sizes.split(",") if size.strip().isdigit()]
    if len(parts) == 1 and parts[0] > 0 and out % parts[0] == 0:
        return (out // parts[0],) * parts[0]
    if sum(parts) != out:
        raise ConfigError(f"{source}: {name!r} has {out} output features, which {sizes!r} does not divide into parts.")
    return tuple(parts)


def _with_ties(model: nn.Module, steps: Sequence[Step]) -> tuple[Step, ...]:
    """A layer that shares a cut parameter is cut as well."""
    planned = {step.name for step in steps}
    cut = {id(step.module.weight): step for step in steps if step.style in ("vocabulary", "logits", "gathered")}
    added = []
    for name, module in model.named_modules():
        step = cut.get(id(getattr(module, "weight", None)))
        if step is not None and name not in planned and module is not step.module and not isinstance(module, Elsewhere):
            style = "vocabulary" if is_lookup(module) else "logits"
            _require_fit(name, module, style, f"the weight of {step.name!r} is cut and shared")
            added.append(Step(name, module, style))
    return (*steps, *added)


# ---------------------------------------------------------------------------------------------------- by names
def find_steps(model: nn.Module) -> Iterator[Step]:
    """Pairs of column and row products, the token embedding, and the output matrix, recognised by their names.

    A product is only cut with its partner: a row whose input is as wide as the output of columns near it.
    """
    products = {name: m for name, m in model.named_modules() if is_product(m) and "expert" not in name}
    columns = {name: blocks_of(model, name, m) for name, m in products.items() if _named(name, _COLUMN)}
    chosen: dict[str, Step] = {}
    for row in (name for name in products if _named(name, _ROW)):
        into = rows_width(products[row])[0]
        for scope in _scopes(row):
            near = [name for name in columns if name.startswith(scope) and name not in chosen]
            match = [name for name in near if _gives(name, products[name], columns[name]) == into]
            if match:
                parents = {name.rpartition(".")[0] for name in match}
                for name in near:
                    if name in match or (name.rpartition(".")[0] in parents and _narrower(products[name], into)):
                        chosen[name] = Step(name, products[name], "column", columns[name])
                chosen[row] = Step(row, products[row], "row")
                break
    yield from chosen.values()
    attentions = {name.rpartition(".")[0] for name, step in chosen.items() if step.style == "column"}
    for name, module in model.named_modules():
        if _named(name, _HEAD_NORM) and name.rpartition(".")[0] in attentions:
            yield Step(name, module, "summed")
    lookups = {n: m for n, m in model.named_modules() if is_lookup(m) and _named(n, _EMBEDDING)}
    vocabularies = {int(m.num_embeddings) for m in lookups.values() if isinstance(m, nn.Embedding)}
    yield from (Step(name, module, "vocabulary") for name, module in lookups.items())
    for name, module in products.items():
        if _named(name, _HEAD) and name not in chosen and rows_width(module)[1] in vocabularies:
            yield Step(name, module, "logits")


def _gives(name: str, module: nn.Module, blocks: Sequence[int]) -> int:
    """Features that a partner of this column product reads."""
    out = rows_width(module)[1]
    interleaved = _named(name, {"query_key_value"})  # query, key and value of the first head, then of the second, ...
    return blocks[0] if blocks else out // 3 if interleaved else out


def blocks_of(model: nn.Module, name: str, module: nn.Module) -> tuple[int, ...]:
    """Sizes of the matrices that a product holds side by side, as its name and the attention around it tell."""
    count = next((n for key, n in _FUSED.items() if _named(name, {key})), 1)
    if count == 1:
        return ()
    out = rows_width(module)[1]
    parent = model.get_submodule(name.rpartition(".")[0])
    heads, key_heads = _count(parent, _HEADS), _count(parent, _KEY_HEADS)
    if count == 3 and heads and key_heads and out % (heads + 2 * key_heads) == 0:
        width = out // (heads + 2 * key_heads)
        return (heads * width, key_heads * width, key_heads * width)
    return (out // count,) * count


def _count(module: nn.Module, names: Sequence[str]) -> int | None:
    return next((value for name in names if isinstance(value := getattr(module, name, None), int)), None)


def _narrower(module: nn.Module, width: int) -> bool:
    """Keys and values have fewer heads than queries when heads share them."""
    out = rows_width(module)[1]
    return out <= width and width % out == 0


def _named(name: str, known: Collection[str]) -> bool:
    last = name.split(".")
    return last[-1] in known or ".".join(last[-2:]) in known


def _scopes(name: str) -> Iterator[str]:
    """Prefixes of the modules around a layer, the nearest first."""
    parts = name.split(".")[:-1]
    for length in range(len(parts), -1, -1):
        yield "".join(f"{part}." for part in parts[:length])

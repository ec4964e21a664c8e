"""One model for translation and repair of sentences in many languages: dense, and with experts, at equal arithmetic.

pip install 'trilithon[examples]'                       # Django, whose message catalogues cover about 100 languages
python examples/multilingual_moe.py
torchrun --nproc-per-node 2 examples/multilingual_moe.py
python examples/multilingual_moe.py --catalogues /usr/share/locale      # or the .mo files of any other program

Every example is bytes: what to do, a sentence, the language that is asked for, the answer. In half of them a sentence
is translated from or into English, in the others one with holes is made whole. Language l with n sentences is drawn in
proportion to n^(1 / temperature). (The recipe at full size: Kim et al. 2021, arXiv:2109.10465, section 4.)
"""

from __future__ import annotations

import argparse
import hashlib
import struct
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import trilithon
from trilithon.models import GPT, GPTConfig

END, HOLE, TRANSLATE, REPAIR, FIRST_LANGUAGE = range(256, 261)  # the first 256 tokens are bytes
LONGEST = 120  # bytes of a sentence
TASKS = ("translation", "repair")
Pairs = dict[str, list[tuple[bytes, bytes]]]  # by language, (English, the same in that language)


def read_catalogue(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """(English, translation) of a .mo file: two tables of lengths and offsets (GNU gettext manual, section 10.3)."""
    data = path.read_bytes()
    order = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}.get(data[:4])
    if order is None:
        raise ValueError(f"{path} is no message catalogue: it begins with {data[:4]!r}")
    number, *tables = struct.unpack_from(f"{order}3I", data, 8)
    for index in range(number):
        found = []
        for table in tables:
            length, start = struct.unpack_from(f"{order}2I", data, table + 8 * index)
            found.append(data[start : start + length].split(b"\0")[0])  # of plurals, the first form
        yield found[0].split(b"\x04")[-1], found[1]  # a context stands before byte 4


def read_pairs(folder: Path, num_languages: int | None = None) -> tuple[Pairs, Pairs]:
    """All catalogues below `folder`: (to train on, held out). One sentence in 16 is held out, in every language.

    num_languages: those with most sentences only.
    """
    found: dict[str, dict[bytes, bytes]] = defaultdict(dict)
    for path in sorted(folder.rglob("LC_MESSAGES/*.mo")):
        language = path.parent.parent.name
        for english, other in read_catalogue(path) if not language.startswith("en") else ():
            if english != other and 0 < len(english) <= LONGEST and 0 < len(other) <= LONGEST:
                found[language][english] = other
    if not any(found.values()):
        raise SystemExit(f"{folder} holds no message catalogues (LC_MESSAGES/*.mo)")
    largest = sorted(found, key=lambda language: (-len(found[language]), language))[:num_languages]
    training: Pairs = {language: [] for language in sorted(largest)}
    held_out: Pairs = {language: [] for language in sorted(largest)}
    for language in training:
        for pair in sorted(found[language].items()):
            apart = hashlib.blake2b(pair[0], digest_size=1).digest()[0] < 16
            (held_out if apart else training)[language].append(pair)
    return training, held_out


@dataclass
class Mixture:
    """Draws examples from pairs of sentences. temperature: 1 in proportion to sentences; more, more alike."""

    pairs: Pairs
    temperature: float

    def __post_init__(self) -> None:
        self.languages = [language for language, pairs in self.pairs.items() if pairs]
        sizes = torch.tensor([len(self.pairs[language]) for language in self.languages], dtype=torch.float64)
        self.shares = sizes.pow(1 / self.temperature) / sizes.pow(1 / self.temperature).sum()
        self.tags = {language: FIRST_LANGUAGE + i for i, language in enumerate(["en", *self.pairs])}

    @property
    def vocab_size(self) -> int:
        return FIRST_LANGUAGE + len(self.tags)

    def example(self, task: str, generator: torch.Generator) -> tuple[list[int], list[int]]:
        """(what is read, what is to be written), as tokens."""
        language = self.languages[int(torch.multinomial(self.shares, 1, generator=generator))]
        english, other = self.pairs[language][_below(len(self.pairs[language]), generator)]
        into = language if _below(2, generator) else "en"
        source, target = (english, other) if into == language else (other, english)
        if task == "repair":
            source, start = with_holes(target, generator), REPAIR
        else:
            source, start = list(source), TRANSLATE
        return [start, *source, self.tags[into]], [*target, END]

    def batch(self, rows: int, context: int, task: str | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(tokens [rows, context], targets [rows, context], -100 where nothing is to be written), examples in a row."""
        tokens, targets = [], []
        for _ in range(rows):
            line: list[int] = []
            marks: list[int] = []
            while len(line) <= context:
                which = task or TASKS[_below(2, generator)]
                read, written = self.example(which, generator)
                line += [*read, *written]
                marks += [-100] * len(read) + written
            tokens.append(line[:context])
            targets.append(marks[1 : context + 1])
        return torch.tensor(tokens), torch.tensor(targets)


def with_holes(sentence: bytes, generator: torch.Generator) -> list[int]:
    """About a third of the bytes are gone, in runs, each with one HOLE in its place."""
    left, at = [], 0
    while at < len(sentence):
        if _below(6, generator) == 0:
            at += 1 + _below(5, generator)
            left.append(HOLE)
        else:
            left.append(sentence[at])
            at += 1
    return left


def _below(limit: int, generator: torch.Generator) -> int:
    return int(torch.randint(limit, (), generator=generator))


def shape(mixture: Mixture, width: int, layers: int, experts: int, context: int = 128) -> GPTConfig:
    """experts: 0 for a dense model; a token goes to one of them, so the arithmetic is the same but for the router."""
    return GPTConfig(
        vocab_size=mixture.vocab_size, context=context, num_layers=layers, width=width, num_heads=4, experts=experts
    )


def loss_sum(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """Cross entropy summed over what is to be written, and how much that is."""
    total = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, int((targets >= 0).sum())


@torch.no_grad()
def held_out_losses(model: torch.nn.Module, mixture: Mixture, context: int, rows: int = 32) -> dict[str, float]:
    """By task, nats per byte of the answer on the same examples every time."""
    training, found = model.training, {}
    model.eval()
    for task in TASKS:
        tokens, targets = mixture.batch(rows, context, task, torch.Generator().manual_seed(0))
        total, number = loss_sum(model(tokens), targets)
        found[task] = float(total) / number
    model.train(training)
    return found


def config_for(lr: float, steps: int) -> dict[str, object]:
    schedule = {"kind": "cosine", "total_steps": steps, "warmup_steps": max(steps // 10, 1), "min_ratio": 0.1}
    return {"optimizer": {"kind": "adamw", "lr": lr}, "lr_schedule": schedule, "clip_norm": 1.0}


def train(name: str, config: GPTConfig, mixtures: tuple[Mixture, Mixture], steps: int, rows: int) -> None:
    """mixtures: to train on, and held out."""
    training, held_out = mixtures
    torch.manual_seed(0)
    model = GPT(config)
    with trilithon.initialize(model, config_for(3e-3, steps)) as engine:
        generator = torch.Generator().manual_seed(1 + engine.rank)  # each rank draws its own examples
        started = time.perf_counter()
        for _ in range(steps):
            tokens, targets = training.batch(rows, config.context, None, generator)
            total, number = loss_sum(engine(tokens), targets)
            engine.backward(total, weight=number)
            engine.step()
        seconds = time.perf_counter() - started
        load = trilithon.moe.load_report(model)
        losses = held_out_losses(model, held_out, config.context)
        if engine.rank == 0:
            told = ", ".join(f"{task} {loss:.3f}" for task, loss in losses.items())
            busiest = f", busiest expert {load['busiest']:.1f} x the mean" if load else ""
            rate = steps * rows * config.context * engine.world_size / seconds
            print(
                f"{name}: {engine.steps} steps on {engine.world_size} ranks, held-out nats per byte: {told}; "
                f"{config.num_parameters():,} parameters, {config.training_flops_per_token():,} operations per token, "
                f"{rate:,.0f} tokens/s{busiest}"
            )


def installed_catalogues() -> Path:
    """Django's folder, if it is installed."""
    found = find_spec("django")
    if found is None or not found.submodule_search_locations:
        raise SystemExit(
            "Django is not installed. Get its catalogues with `pip install 'trilithon[examples]'`, or name a folder "
            "with others: --catalogues /usr/share/locale"
        )
    return Path(found.submodule_search_locations[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--catalogues", type=Path, help="a folder with LC_MESSAGES/*.mo below it; default: Django's")
    parser.add_argument("--languages", type=int, help="only so many, those with most sentences")
    parser.add_argument("--temperature", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pairs, apart = read_pairs(arguments.catalogues or installed_catalogues(), arguments.languages)
    training, held_out = Mixture(pairs, arguments.temperature), Mixture(apart, arguments.temperature)
    number = sum(map(len, pairs.values()))
    print(f"{number:,} sentences in {len(pairs)} languages besides English")
    for name, experts in (("dense", 0), (f"{arguments.experts} experts", arguments.experts)):
        config = shape(training, arguments.width, arguments.layers, experts)
        train(name, config, (training, held_out), arguments.steps, arguments.rows)


if __name__ == "__main__":
    main()

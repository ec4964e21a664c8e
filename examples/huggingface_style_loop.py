"""A training loop as scripts for Hugging Face models have it: dicts in, `.loss` out, a torch optimizer and scheduler.

Nothing of the loop knows which ZeRO stage runs; the configuration is a DeepSpeed file, read as it is.

python examples/huggingface_style_loop.py
torchrun --nproc-per-node 2 examples/huggingface_style_loop.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trilithon
from trilithon.data import prepare_loader

NUM_CLASSES, VOCABULARY, TOKENS, WIDTH = 3, 50, 12, 32
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


class Classifier(nn.Module):
    """Mean of token embeddings, two layers, a class."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        )
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Output:
        weights = attention_mask.unsqueeze(-1).to(self.embedding.weight.dtype)
        mean = (self.embedding(input_ids) * weights).sum(1) / weights.sum(1)
        logits = self.head(self.body(mean))
        loss = None if labels is None else F.cross_entropy(logits.float(), labels)
        return Output(loss, logits)


def samples(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Sequences of random tokens; the class is that of the first token."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
        kind = int(torch.randint(0, NUM_CLASSES, (), generator=generator))
        tokens[: TOKENS // 2] = kind  # half of the sequence gives it away
        made.append(
            {"input_ids": tokens, "attention_mask": torch.ones(TOKENS, dtype=torch.long), "labels": torch.tensor(kind)}
        )
    return made


def accuracy(engine: trilithon.Engine, batches: list[dict[str, Tensor]]) -> float:
    right = total = 0
    with engine.uneven():  # the ranks need not have equally many batches
        for batch in batches:
            logits = engine.eval_step(batch).logits
            right += int((logits.argmax(-1) == batch["labels"]).sum())
            total += len(batch["labels"])
    return right / total


def main() -> None:
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=30)
    engine = trilithon.initialize(model, DEEPSPEED, optimizer, scheduler)
    loader = prepare_loader(samples(512, seed=1), 8, rank=engine.rank, world_size=engine.world_size)
    for _epoch in range(2):
        for batch in loader:
            output = engine(**batch)
            engine.backward(output.loss)
            if engine.step() and engine.rank == 0 and engine.steps % 10 == 0:  # True when the weights changed
                print(
                    f"step {engine.steps}: loss {engine.loss:.3f}, lr {engine.lr[0]:.2e}, norm {engine.grad_norm:.2f}"
                )
    held_out = torch.utils.data.default_collate(samples(128, seed=2))
    reached = accuracy(engine, [held_out])
    if engine.rank == 0:
        print(f"{engine.steps} steps on {engine.world_size} ranks, accuracy {reached:.2f}")
    engine.close()


if __name__ == "__main__":
    main()

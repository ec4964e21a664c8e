"""Supervised fine-tuning with trl's SFTTrainer on plain texts, whole or with LoRA adapters."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, HfArgumentParser
from trl import SFTConfig, SFTTrainer


@dataclass
class ScriptArguments:
    """What SFTConfig does not ask for."""

    model: str
    text: str
    train_texts: int = 32
    lora_rank: int = 0


def main() -> None:
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    args, config = HfArgumentParser((ScriptArguments, SFTConfig)).parse_args_into_dataclasses()

    paragraphs = [part.strip() for part in Path(args.text).read_text(encoding="utf-8").split("\n\n")]
    texts = [part for part in paragraphs if len(part) > 40][: args.train_texts]
    lora = None
    if args.lora_rank:
        lora = LoraConfig(
            r=args.lora_rank, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        )
    config.model_init_kwargs = {"dtype": "float32"}
    trainer = SFTTrainer(
        model=args.model,
        args=config,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        peft_config=lora,
    )
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        report = {"log": trainer.state.log_history}
        Path(config.output_dir, "report.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

"""Fine-tune a causal language model with transformers' Trainer and a DeepSpeed JSON file (`--deepspeed ds.json`)."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from corpus import Blocks
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ScriptArguments:
    """What the Trainer does not ask for."""

    model: str
    text: str
    block_length: int = 32
    train_blocks: int = 64
    eval_blocks: int = 8
    extra_tokens: int = 0
    freeze: str = ""
    lora_rank: int = 0
    generate_tokens: int = 0
    resume: str = ""
    evaluate_only: bool = False


def build_model(args: ScriptArguments, vocabulary: int) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    if args.extra_tokens:
        model.resize_token_embeddings(vocabulary, mean_resizing=False)
    if args.freeze:
        for name, parameter in model.named_parameters():
            if args.freeze in name:
                parameter.requires_grad = False
    if args.lora_rank:
        lora = LoraConfig(
            r=args.lora_rank,
            lora_alpha=2 * args.lora_rank,
            lora_dropout=0.0,
            target_modules=["q_proj", "v_proj"],
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model, lora)
    return model


def main() -> None:
    # On a machine without accelerators the backend has to be named before TrainingArguments looks for one.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")

    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.add_tokens([f"<extra_{number}>" for number in range(args.extra_tokens)])
    train = Blocks(args.text, tokenizer, args.block_length, args.train_blocks)
    held_out = Blocks(args.text, tokenizer, args.block_length, args.eval_blocks, first=args.train_blocks)

    trainer = Trainer(
        model=build_model(args, len(tokenizer)),
        args=training_args,
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    if not args.evaluate_only:
        trainer.train(resume_from_checkpoint=args.resume or None)
        trainer.save_model()
    evaluated = trainer.evaluate()

    generated = None
    if args.generate_tokens:
        prompt = train[0]["input_ids"][:8].unsqueeze(0).to(trainer.args.device)
        with torch.no_grad():
            generated = trainer.model.generate(
                prompt,
                max_new_tokens=args.generate_tokens,
                do_sample=False,
                synced_gpus=training_args.world_size > 1,
                pad_token_id=tokenizer.pad_token_id,
            )

    if trainer.is_world_process_zero():
        report = {
            "log": trainer.state.log_history,
            "best": trainer.state.best_model_checkpoint,
            "eval_loss": evaluated["eval_loss"],
            "generated": None if generated is None else generated[0].tolist(),
        }
        (Path(training_args.output_dir) / "report.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

"""Load a published model under ZeRO stage 3 with HfDeepSpeedConfig, and generate from it without an optimizer."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import deepspeed
import torch
from corpus import Blocks
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import HfDeepSpeedConfig


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--new_tokens", type=int, default=8)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    args = parser.parse_args()

    deepspeed.init_distributed(dist_backend="gloo")
    rank, world = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    config = {
        "train_batch_size": world,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 2000,
    }
    keep_alive = HfDeepSpeedConfig(config)  # has to exist before the model is made, and as long as it is used
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    partitioned = sum(p.ds_status == ZeroParamStatus.NOT_AVAILABLE for p in model.parameters())
    engine = deepspeed.initialize(model=model, config_params=config)[0]
    engine.module.eval()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompt = Blocks(args.text, tokenizer, 8, world)[rank]["input_ids"].unsqueeze(0).to(engine.device)
    with torch.no_grad():
        tokens = engine.module.generate(
            prompt,
            max_new_tokens=args.new_tokens,
            do_sample=False,
            synced_gpus=True,
            pad_token_id=tokenizer.pad_token_id,
        )
        logits = engine(prompt).logits
    report = {
        "tokens": tokens[0].tolist(),
        "logits": logits[0, -1].float().tolist(),
        "partitioned": partitioned,
        "parameters": sum(p.ds_numel for p in model.parameters()),
        "stage": keep_alive.get_value("zero_optimization.stage"),
    }
    Path(args.output_dir, f"report_{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()

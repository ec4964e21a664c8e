#!/bin/sh
# Writes every golden checkpoint of this folder again. Run it with the environment of README.md active.
set -eu
cd "$(dirname "$0")"
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
for ranks in 2 3 4; do
  python -m torch.distributed.run --standalone --nproc-per-node "$ranks" generate.py
done
for ranks in 2 4; do
  python -m torch.distributed.run --standalone --nproc-per-node "$ranks" generate_parallel.py
done
for source in zero1_fp16 zero3_bf16; do
  target="universal_from_$source"
  rm -rf "$target" && mkdir "$target"
  python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state \
    --input_folder "$source/global_step3" --output_folder "$target/global_step3_universal"
  cp "$source/expected.safetensors" "$target/"
  printf %s global_step3_universal > "$target/latest_universal"
  rm -f "$source/latest_universal"
done

"""`deepspeed.runtime.fp16`: its names are in the tables of `names`."""

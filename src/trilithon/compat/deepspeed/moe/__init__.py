"""`deepspeed.moe`: its names are in the tables of `names`."""

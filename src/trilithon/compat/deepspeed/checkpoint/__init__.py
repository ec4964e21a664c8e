"""`deepspeed.checkpoint`: its names are in the tables of `names`."""

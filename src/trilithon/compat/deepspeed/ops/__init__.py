"""`deepspeed.ops`: its names are in the tables of `names`."""

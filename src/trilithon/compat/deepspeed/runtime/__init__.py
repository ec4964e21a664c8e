"""`deepspeed.runtime`: its names are in the tables of `names`."""

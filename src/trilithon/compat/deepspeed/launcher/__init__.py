"""`deepspeed.launcher`: its names are in the tables of `names`."""

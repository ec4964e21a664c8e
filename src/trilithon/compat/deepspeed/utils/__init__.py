"""`deepspeed.utils`: its names are in the tables of `names`."""

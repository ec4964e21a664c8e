"""`deepspeed.runtime.zero`: its names are in the tables of `names`."""

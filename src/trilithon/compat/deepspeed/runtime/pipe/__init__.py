"""`deepspeed.runtime.pipe`: its names are in the tables of `names`."""

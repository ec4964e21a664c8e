"""`deepspeed.monitor`: its names are in the tables of `names`."""

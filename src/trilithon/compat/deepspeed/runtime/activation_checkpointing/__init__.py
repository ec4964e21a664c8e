"""`deepspeed.runtime.activation_checkpointing`: its names are in the tables of `names`."""

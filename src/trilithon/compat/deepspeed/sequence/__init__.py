"""`deepspeed.sequence`."""

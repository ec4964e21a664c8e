"""`deepspeed.launcher`: DeepSpeed's command line for starting ranks, on `trilithon.launch`."""

"""`deepspeed.moe`: mixtures of experts, on `trilithon.MoE`."""

"""Other libraries' public names, mapped onto ours: `trilithon.compat.deepspeed`."""

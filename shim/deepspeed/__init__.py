"""`deepspeed`, where this distribution is installed: trilithon.compat.deepspeed under that name."""

from trilithon.compat.deepspeed.stand_in import stand_in

stand_in(installed=True)

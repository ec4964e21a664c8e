"""`deepspeed`, for programs that were started through trilithon: trilithon.compat.deepspeed under that name."""

from trilithon.compat.deepspeed.stand_in import stand_in

stand_in()

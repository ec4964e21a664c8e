"""`deepspeed.utils.numa`."""

from __future__ import annotations

from trilithon.compat.deepspeed.refused import refused

get_numactl_cmd = refused("utils.numa.get_numactl_cmd", "Bind ranks with numactl, taskset or srun yourself.")

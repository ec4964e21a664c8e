"""`deepspeed.launcher.constants`."""

from __future__ import annotations

PDSH_LAUNCHER, OPENMPI_LAUNCHER, MPICH_LAUNCHER = "pdsh", "openmpi", "mpich"
IMPI_LAUNCHER, SLURM_LAUNCHER, MVAPICH_LAUNCHER = "impi", "slurm", "mvapich"
PDSH_MAX_FAN_OUT = 1024

"""`deepspeed.launcher.multinode_runner`: machines are started over ssh or by SLURM, and in no other way."""

from __future__ import annotations

from trilithon.compat.deepspeed.refused import refused

_WAY = "Hosts are started over ssh (`deepspeed --hostfile F`), or by srun, whose environment is read."

MultiNodeRunner = refused("launcher.multinode_runner.MultiNodeRunner", _WAY)
PDSHRunner = refused("launcher.multinode_runner.PDSHRunner", _WAY)
OpenMPIRunner = refused("launcher.multinode_runner.OpenMPIRunner", _WAY)
MPICHRunner = refused("launcher.multinode_runner.MPICHRunner", _WAY)
IMPIRunner = refused("launcher.multinode_runner.IMPIRunner", _WAY)
SlurmRunner = refused("launcher.multinode_runner.SlurmRunner", _WAY)
MVAPICHRunner = refused("launcher.multinode_runner.MVAPICHRunner", _WAY)

"""Starting processes: host files, device selection, SLURM, the plan (who runs where) and the agent that carries it out.

    plan = make_plan(LaunchOptions(command=Command("script", "train.py"), nproc=2), os.environ)
    raise SystemExit(run_node(plan))

Everything here is free of torch until `agent.run_node` starts processes, so that a dry run or an error answers at once.
"""

from __future__ import annotations

from trilithon.launch.hosts import Host, parse_filter, parse_host_file, read_host_file, select
from trilithon.launch.plan import Command, LaunchOptions, Node, Plan, Process, make_plan
from trilithon.launch.slurm import SlurmJob, expand_node_list, slurm_job

__all__ = [
    "Command",
    "Host",
    "LaunchOptions",
    "Node",
    "Plan",
    "Process",
    "SlurmJob",
    "expand_node_list",
    "make_plan",
    "parse_filter",
    "parse_host_file",
    "read_host_file",
    "select",
    "slurm_job",
]

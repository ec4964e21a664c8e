"""What SLURM's environment says about a job step: nodes, this node's rank, a rendezvous endpoint.

Start one launcher per node: `srun --ntasks-per-node=1 trilithon launch --nproc 4 train.py`. Node lists follow SLURM's
bracket notation: `gpu[01-03,07]`, `rack[1-2]n[0-1]`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trilithon.errors import ConfigError

_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """One job step as SLURM describes it to a task."""

    nodes: tuple[str, ...]  # in rank order
    node_rank: int
    master_port: int  # the same on every node, from the job's number
    gpus_on_node: int | None


def slurm_job(environment: Mapping[str, str]) -> SlurmJob | None:
    """The job step this process is a task of; None outside `srun`.

    Raises ConfigError when the variables contradict each other or when srun started several tasks per node (the
    launcher starts the processes of a node itself).
    """
    if "SLURM_PROCID" not in environment or not ("SLURM_STEP_ID" in environment or "SLURM_STEPID" in environment):
        return None  # a batch script or an allocation without srun: SLURM variables, but no step
    listing = _first(environment, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    if listing is None:
        raise ConfigError("SLURM_PROCID is set but no SLURM_STEP_NODELIST or SLURM_NODELIST. Start through srun.")
    nodes = expand_node_list(listing)
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default=len(nodes))
    if tasks != len(nodes):
        raise ConfigError(
            f"SLURM started {tasks} tasks on {len(nodes)} nodes, but the launcher starts the processes of a node "
            "itself. Use `srun --ntasks-per-node=1 trilithon launch --nproc N script.py`."
        )
    rank = _number(environment, "SLURM_NODEID", "SLURM_PROCID", default=0)
    if rank >= len(nodes):
        raise ConfigError(f"SLURM_NODEID={rank} does not fit {len(nodes)} nodes ({listing}). Start through srun.")
    job = _number(environment, "SLURM_JOB_ID", "SLURM_JOBID", default=0)
    gpus = re.fullmatch(r"\d+", environment.get("SLURM_GPUS_ON_NODE", ""))
    # Below Linux's ephemeral range (32768 and up), so that no outgoing connection can hold the port.
    return SlurmJob(nodes, rank, 20000 + job % 12000, int(gpus[0]) if gpus else None)


def expand_node_list(text: str) -> tuple[str, ...]:
    """`gpu[01-03,07],login` -> ("gpu01", "gpu02", "gpu03", "gpu07", "login"). Raises ConfigError."""
    names: list[str] = []
    for part in _split_outside_brackets(text):
        expanded = [""]
        consumed = 0
        for piece in _PIECE.finditer(part):
            if piece.start() != consumed:
                break
            consumed = piece.end()
            choices = [piece[2]] if piece[1] is None else _expand_ranges(piece[1], text)
            expanded = [prefix + choice for prefix in expanded for choice in choices]
        if consumed != len(part) or not part:
            raise ConfigError(
                f"SLURM node list {text!r} cannot be read at {part!r}. Expected a form like gpu[01-03,07]."
            )
        names += expanded
    return tuple(names)


def _split_outside_brackets(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]]


def _expand_ranges(body: str, text: str) -> list[str]:
    choices: list[str] = []
    for item in body.split(","):
        matched = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if matched is None:
            raise ConfigError(
                f"SLURM node list {text!r} cannot be read at {item!r}. Expected numbers or ranges: 01-03."
            )
        first, last = matched[1], matched[2] or matched[1]
        if int(last) < int(first) or int(last) - int(first) > 100_000:
            raise ConfigError(f"SLURM node list {text!r}: range {item!r} runs backwards or is too long.")
        choices += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return choices


def _first(environment: Mapping[str, str], *names: str) -> str | None:
    return next((environment[name] for name in names if environment.get(name)), None)


def _number(environment: Mapping[str, str], *names: str, default: int) -> int:
    value = _first(environment, *names)
    if value is None:
        return default
    if not re.fullmatch(r"\d+", value):
        raise ConfigError(f"{names[0]}={value!r} is not a whole number. Start through srun.")
    return int(value)

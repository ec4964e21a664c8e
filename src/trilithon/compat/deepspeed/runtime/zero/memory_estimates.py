"""Memory for the states of a model by DeepSpeed's own formulas, as its `estimate_...` functions print them.

P parameters, L those of the largest layer, g devices on each of n nodes, f the buffer factor; bytes per node (CPU) and
per device. They know fp16 training with Adam and nothing of activations; `trilithon plan` will say what runs need here.

    stage 3   device: 4 L + (18 P / gn | 2 P / gn | 0)     nothing, the optimizer, or parameters too off the device
              CPU:    4 (L or P) g f without offload (L under zero.Init); else (16 | 18) P f / n, at least 4 P g f
                      without zero.Init
    stage 2   device: 2 P + 18 P / gn, or 2 P with the optimizer off the device
              CPU:    4 P g f, or max(4 P g n f, 16 P f)
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

_GIB = 2**30


def estimate_zero3_model_states_mem_needs(
    total_params: int, largest_layer_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1,
    cpu_offload: bool = True, cpu_offload_params: bool = True, zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:  # fmt: skip
    """(bytes of CPU memory per node, of device memory, of the largest layer)."""
    devices, layer = num_gpus_per_node * num_nodes, 4 * largest_layer_params
    whole = 4 * total_params * num_gpus_per_node * additional_buffer_factor
    if not cpu_offload:
        cpu = layer * num_gpus_per_node * additional_buffer_factor if zero_init else whole
        return int(cpu), int(layer + 18 * total_params / devices), layer
    states = (18 if cpu_offload_params else 16) * total_params * additional_buffer_factor / num_nodes
    device = layer + (0 if cpu_offload_params else 2 * total_params / devices)
    return int(states if zero_init else max(whole, states)), int(device), layer


def estimate_zero2_model_states_mem_needs(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:  # fmt: skip
    """(bytes of CPU memory per node, of device memory)."""
    devices = num_gpus_per_node * num_nodes
    if cpu_offload:
        most = max(4 * total_params * devices, 16 * total_params)
        return int(most * additional_buffer_factor), 2 * total_params
    cpu = 4 * total_params * num_gpus_per_node * additional_buffer_factor
    return int(cpu), int(2 * total_params + 18 * total_params / devices)


def model_to_params(model: nn.Module) -> tuple[int, int]:
    """(parameters, parameters of the largest module, those inside it not counted)."""
    total = sum({id(p): p.numel() for p in model.parameters()}.values())
    return total, max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table for a model that is there."""
    total, largest = model_to_params(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int, largest_layer_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:  # fmt: skip
    """Print the table for numbers of parameters."""

    def rows() -> Iterator[tuple[int, int, str]]:
        for optimizer, params in ((True, True), (True, False), (False, False)):
            for zero_init in (True, False):
                cpu, device, _ = estimate_zero3_model_states_mem_needs(
                    total_params, largest_layer_params, num_gpus_per_node, num_nodes, optimizer, params, zero_init,
                    additional_buffer_factor,
                )  # fmt: skip
                options = f"offload_param={_tier(params)}, offload_optimizer={_tier(optimizer)}, zero_init="
                yield cpu, device, options + str(int(zero_init))

    size = f"{_millions(total_params)} total params, {_millions(largest_layer_params)} largest layer params."
    _print(num_gpus_per_node, num_nodes, size, rows())


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table for a model that is there."""
    total, _ = model_to_params(model)
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table for a number of parameters."""
    rows = []
    for optimizer in (True, False):
        cpu, device = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, optimizer, additional_buffer_factor
        )
        rows.append((cpu, device, f"offload_optimizer={_tier(optimizer)}"))
    _print(num_gpus_per_node, num_nodes, f"{_millions(total_params)} total params.", iter(rows))


def _tier(on_cpu: bool) -> str:
    return "cpu" if on_cpu else "none"


def _millions(params: int) -> str:
    return f"{params / 1e6:.0f}M"


def _print(devices: int, nodes: int, size: str, rows: Iterator[tuple[int, int, str]]) -> None:
    print("Memory for parameters, gradients and optimizer states, by DeepSpeed's formulas")
    print(f"{nodes} node{'s' * (nodes > 1)} with {devices} device{'s' * (devices > 1)} each; {size}")
    print("  per CPU  |  per GPU |   Options")
    for cpu, device, options in rows:
        print(f" {cpu / _GIB:7.2f}GB | {device / _GIB:6.2f}GB | {options}")

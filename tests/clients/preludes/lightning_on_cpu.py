"""Lightning's DeepSpeed strategy refuses every accelerator but CUDA, and counts devices by an index that a CPU lacks.

Both checks are lifted here, and a CPU gets the index 0, for tests on machines without a GPU only. Nothing else of
Lightning is touched.
"""

import lightning.fabric.strategies.deepspeed as in_fabric
import lightning.pytorch.strategies.deepspeed as in_pytorch
import torch
from lightning.pytorch.accelerators import CPUAccelerator

in_pytorch.CUDAAccelerator = CPUAccelerator
in_pytorch._validate_device_index_selection = lambda devices: None
in_fabric._validate_device_index_selection = lambda devices: None
CPUAccelerator.get_parallel_devices = staticmethod(lambda devices: [torch.device("cpu", 0)] * int(devices))

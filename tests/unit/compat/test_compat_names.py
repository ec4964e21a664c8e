"""What importing the package costs, which names are there, and what is said of those that are not."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
import torch

from trilithon.compat import deepspeed
from trilithon.compat.deepspeed.accelerator import get_accelerator
from trilithon.compat.deepspeed.refused import RefusedError
from trilithon.compat.deepspeed.resolve import MissingNameError

NAMES = [
    *("initialize", "init_distributed", "add_config_arguments", "tp_model_init", "DeepSpeedEngine", "DeepSpeedConfig"),
    *("DeepSpeedConfigError", "DeepSpeedOptimizer", "get_accelerator", "init_inference", "InferenceEngine"),
    *("DeepSpeedHybridEngine", "comm", "dist", "ops", "runtime", "accelerator", "monitor", "HAS_TRITON"),
    *("__version__", "__version_major__", "__version_minor__", "__version_patch__", "__git_hash__", "__git_branch__"),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_at_the_top_is_found(name):
    assert getattr(deepspeed, name) is not None


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("ops.adam", "FusedAdam"),
        ("ops.adam", "DeepSpeedCPUAdam"),
        ("ops.lamb", "FusedLamb"),
        ("ops.lion", "DeepSpeedCPULion"),
        ("ops.adagrad", "DeepSpeedCPUAdagrad"),
        ("ops.op_builder", "CPUAdamBuilder"),
        ("runtime.lr_schedules", "VALID_LR_SCHEDULES"),
        ("runtime.base_optimizer", "DeepSpeedOptimizer"),
        ("runtime.bf16_optimizer", "BF16_Optimizer"),
        ("runtime.fp16.fused_optimizer", "FP16_Optimizer"),
        ("runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer"),
        ("runtime.fp16.loss_scaler", "DynamicLossScaler"),
        ("runtime.config_utils", "DeepSpeedConfigModel"),
        ("runtime.dataloader", "RepeatingLoader"),
        ("runtime.utils", "see_memory_usage"),
        ("accelerator.real_accelerator", "get_accelerator"),
        ("monitor.monitor", "MonitorMaster"),
        ("git_version_info", "version"),
    ],
)
def test_a_path_is_reached_by_attributes_alone(path, name):
    """As programs do after `import deepspeed`, without importing the submodule."""
    found = deepspeed
    for part in path.split("."):
        found = getattr(found, part)
    assert getattr(found, name) is not None


def test_importing_the_package_imports_no_torch_and_takes_no_device():
    code = "import sys, trilithon.compat.deepspeed as d; d.__version__; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


def test_the_older_release_is_one_switch():
    code = "import trilithon.compat.deepspeed as d; print(d.__version__)"
    env = {**os.environ, "TRILITHON_DEEPSPEED_RELEASE": "0.16"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=env)
    assert done.stdout.strip() == "0.16.5" and deepspeed.__version__ == "0.19.8"


def test_an_unknown_name_says_where_to_look_and_leaves_hasattr_working():
    with pytest.raises(MissingNameError, match=r"deepspeed\.nothing does not exist here\. docs/compat\.md"):
        _ = deepspeed.nothing
    with pytest.raises(AttributeError, match=r"deepspeed\.elasticity .*trilithon launch"):
        _ = deepspeed.elasticity
    with pytest.raises(AttributeError, match=r"deepspeed\.ops\.aio .*offload\.path"):
        _ = deepspeed.ops.aio
    assert not hasattr(deepspeed.runtime, "hybrid_engine")


@pytest.mark.parametrize(
    ("path", "name", "way"),
    [
        ("utils.logging", "print_rank_0", "log_dist"),
        ("utils.nvtx", "range_push", r"torch\.cuda\.nvtx"),
        ("utils.torch", "register_grad_hook", "register_post_accumulate_grad_hook"),
        ("runtime.zero.utils", "is_zero3_model", r"trilithon\.zero\.is_cut"),
    ],
)
def test_a_name_that_is_left_out_of_a_module_says_what_to_use(path, name, way):
    module = importlib.import_module(f"{deepspeed.__name__}.{path}")
    with pytest.raises(MissingNameError, match=rf"deepspeed\.{path}\.{name} does not exist here.*{way}"):
        getattr(module, name)


def test_what_is_not_carried_over_says_so_when_it_is_used():
    with pytest.raises(RefusedError, match=r"deepspeed\.init_inference does not exist here.*generate"):
        deepspeed.init_inference(torch.nn.Linear(1, 1))
    with pytest.raises(NotImplementedError, match="compiled module"):
        deepspeed.ops.op_builder.FusedAdamBuilder().load()
    with pytest.raises(RefusedError, match=r"torch\.optim\.Muon"):
        deepspeed.ops.muon.MuonWithAuxAdam([])


def test_the_accelerator_is_the_host_without_a_gpu():
    accelerator = get_accelerator()
    if torch.cuda.is_available():
        assert accelerator.current_device_name().startswith("cuda:")
        assert accelerator.communication_backend_name() == "nccl"
        return
    assert accelerator is deepspeed.accelerator.get_accelerator()
    assert (accelerator.device_name(), accelerator.current_device_name()) == ("cpu", "cpu")
    assert accelerator.communication_backend_name() == "gloo" and accelerator.device_count() >= 1
    assert accelerator.is_bf16_supported() and torch.bfloat16 in accelerator.supported_dtypes()
    assert (
        accelerator.on_accelerator(torch.ones(1)) and 0 < accelerator.available_memory() <= accelerator.total_memory()
    )
    accelerator.manual_seed(3)
    first = torch.rand(1)
    accelerator.manual_seed_all(3)
    assert torch.equal(torch.rand(1), first)


def test_comm_is_one_rank_before_there_is_a_group_and_torchs_functions_otherwise():
    comm = deepspeed.comm
    assert not comm.is_initialized() and (comm.get_rank(), comm.get_world_size()) == (0, 1)
    assert comm.all_reduce is torch.distributed.all_reduce and comm.ReduceOp is torch.distributed.ReduceOp
    comm.barrier()
    comm.init_distributed(verbose=False)  # no environment: a group of this process
    try:
        value = torch.ones(2)
        comm.all_reduce(value)
        assert value.tolist() == [1.0, 1.0] and comm.get_global_rank(comm.get_world_group(), 0) == 0
    finally:
        comm.destroy_process_group()

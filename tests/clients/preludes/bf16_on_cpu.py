"""TrainingArguments refuses bf16 beside DeepSpeed on a machine without a GPU, although its CPU computes in bf16.

That check is lifted here, for tests on such machines only. Nothing else of transformers is touched.
"""

from transformers import training_args

training_args.is_torch_bf16_gpu_available = lambda: True

"""What a model's files say, without reading a weight and without torch: shape of the model, tensor index, tokenizer.

Two kinds of checkpoint, a Hugging Face directory and a GGUF file, become one `Checkpoint`. Tensors are named as Hugging
Face names them, whichever kind they come from. The bytes are read by `stageline.weights`, in the workers.
"""

from stageline.checkpoint.checkpoint import Checkpoint, TensorEntry
from stageline.checkpoint.generation_defaults import GenerationDefaults, generation_defaults
from stageline.checkpoint.model_spec import ModelSpec, RopeSpec
from stageline.checkpoint.open import open_checkpoint
from stageline.checkpoint.stage_tensors import stage_file_bytes, stage_tensor_names, stage_weight_bytes

__all__ = [
    "Checkpoint",
    "GenerationDefaults",
    "ModelSpec",
    "RopeSpec",
    "TensorEntry",
    "generation_defaults",
    "open_checkpoint",
    "stage_file_bytes",
    "stage_tensor_names",
    "stage_weight_bytes",
]

"""What a model's files say, without reading a weight and without torch: shape of the model, tensor index, tokenizer.

Two kinds of checkpoint, a Hugging Face directory and a GGUF file, become one `Checkpoint`. Tensors are named as Hugging
Face names them, whichever kind they come from. The bytes are read by `stageline.weights`, in the workers.
"""

"""Files that hold one or several tensors: npy, npz, safetensors and torch's own."""

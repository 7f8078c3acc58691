"""Run by ComfyUI's own Python: `make_gguf.py MODELS` writes `flux.gguf` beside `flux.safetensors`, in eight bits.

As the files that people load (Q8_0): matrices in blocks of 32 numbers with a scale each, everything else as it was.
"""

import sys

import gguf
from safetensors.numpy import load_file

KIND = gguf.GGMLQuantizationType.Q8_0

folder = sys.argv[1]
writer = gguf.GGUFWriter(f"{folder}/flux.gguf", "flux")
for name, weight in load_file(f"{folder}/flux.safetensors").items():
    if weight.ndim == 2:
        writer.add_tensor(name, gguf.quantize(weight.astype("float32"), KIND), raw_dtype=KIND)
    else:
        writer.add_tensor(name, weight)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

"""Models from files: a Hugging Face directory, a GGUF file, or the bundled default.

load.py                     `load(name_or_path)`: the one entry
names.py                    what a name means; `list_models` for the command line
loaded.py                   the result, as data
hf.py, hf_vocab.py          Hugging Face directories, through mlx-lm
safetensors.py              their weight files, checked before use
gguf.py, gguf_*.py          GGUF: checked header, config and tensor names, vocabulary
heads.py, beside.py         draft heads that a checkpoint carries; a drafter in a directory of its own
families.py, light.py       model classes by type; replay.py: the states of mlx-lm's delta nets at every row
layouts.py, quantizable.py  what a model keeps per token, and which of it can be quantized
dense.py, digest.py         weights as plain floats; the identity of weights
"""

from .digest import digest
from .load import load
from .loaded import Kind, Loaded
from .names import Source, list_models, resolve

__all__ = ["Kind", "Loaded", "Source", "digest", "list_models", "load", "resolve"]

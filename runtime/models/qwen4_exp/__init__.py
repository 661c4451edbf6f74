"""qwen4_exp (Qwen3.8-Flash-Next), the text trunk as our own MLX model.

config      what config.json says, checked          load       checkpoint directory -> Model
layers      norms, taps, rotary angles              hyper      the n gated residual streams
delta       gated delta net                         moe        experts and the shared expert
indexer     pooled keys and scores                  topk       the best blocks, ties as the reference has them
attention   softmax over selected rows, in tiles
ngram       token n-grams -> table rows             table      those rows, memory-mapped
ple         per-layer embeddings                    mtp        the draft head
cache       protocols of what layers keep           memory     a plain keeper of it
served      layout and self-check, for the bank's rows
"""

from .cache import IndexedRows, LayerRows, RecurrentRows, StateSpec, Steps, Trail, Window
from .config import INDEXED, LINEAR, Config, is_qwen4_exp, parse_config
from .load import load_qwen4_exp
from .memory import Conversation, Round
from .model import Model
from .mtp import mtp_logits, propose

__all__ = [
    "INDEXED",
    "LINEAR",
    "Config",
    "Conversation",
    "IndexedRows",
    "LayerRows",
    "Model",
    "RecurrentRows",
    "Round",
    "StateSpec",
    "Steps",
    "Trail",
    "Window",
    "is_qwen4_exp",
    "load_qwen4_exp",
    "mtp_logits",
    "parse_config",
    "propose",
]

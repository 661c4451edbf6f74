"""Drafters that run on the device: they read the hidden states of a round and propose what comes next.

device.py    `DeviceDrafter`, the one interface, and `After`: a strip once its round is picked and verified
taps.py      `Taps`: the outputs of chosen modules of a model, as they are computed
rows.py      `HeadRows`: a drafter's own layers, kept in the bank's rows beside the model's
mtp.py       `MtpDrafter`: multi-token prediction, one row and one token at a time
qwen3_5.py   the head that Qwen3.5 checkpoints carry; qwen4_exp.py that of qwen4_exp
block.py     `BlockDrafter`: a small model beside the target (dflash.py) that fills a block of masks; beside.py makes it
opened.py    `drafter_for`: which drafter a loaded model has
Everything here runs on the device thread. No drafter decides a token: proposals are verified like any other.
"""

from .block import BlockDrafter
from .device import After, DeviceDrafter
from .mtp import MtpDrafter
from .opened import drafter_for
from .taps import Taps

__all__ = ["After", "BlockDrafter", "DeviceDrafter", "MtpDrafter", "Taps", "drafter_for"]

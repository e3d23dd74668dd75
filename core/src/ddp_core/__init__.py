"""ddp_core: one PyTorch DDP training program, the same at every site. A site's train.py needs these two names."""

from ddp_core.rank import Rank
from ddp_core.run import run

__all__ = ["Rank", "run"]
__version__ = "0.1.0"

"""Becomes torchrun, which runs ddp.py on two ranks with the same arguments."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = str(Path(__file__).with_name("ddp.py"))
    os.execv(sys.executable, [sys.executable, *launcher, script, *sys.argv[1:]])

"""`everstep` with the blind agents of `blind_agent.py` in its demo; see `make demo-check BUG=ghost`."""

from __future__ import annotations

import sys
from pathlib import Path

from everstep.cli import demo
from everstep.cli.main import main

if __name__ == "__main__":
    demo.AGENT_PROGRAM = (sys.executable, str(Path(__file__).with_name("blind_agent.py")))
    sys.exit(main())

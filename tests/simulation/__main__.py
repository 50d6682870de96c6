"""`python -m tests.simulation`: the same as `python tests/simulation/simulate.py`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from simulate import main

sys.exit(main())

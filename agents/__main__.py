"""`python -m agents`: the node agent. Exit code 2: something has to be put right before it can start."""

from __future__ import annotations

import asyncio
import os
import sys

from agents.daemon import serve
from agents.errors import AgentError
from agents.log_lines import NodeLog, configure_logging
from agents.settings import parse_settings

log = NodeLog("agents")


def main() -> int:
    try:
        settings = parse_settings(sys.argv[1:], os.environ)
        configure_logging(verbose=settings.verbose)
        asyncio.run(serve(settings))
    except AgentError as err:
        print(f"everstep agent: {err}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

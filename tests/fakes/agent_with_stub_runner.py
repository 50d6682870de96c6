"""Runs the real agent, in a process of its own, with `stub_runner` in the place of the training side's runner.

With AGENT_RUNNER=module it starts `-m everstep.elastic.runner` of the job's interpreter, as usual.
"""

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path

from agents.daemon import serve
from agents.log_lines import configure_logging
from agents.settings import RUNNER_COMMAND, parse_settings

if __name__ == "__main__":
    configure_logging(verbose=True)
    settings = replace(
        parse_settings(sys.argv[1:], os.environ),
        runner_command=RUNNER_COMMAND
        if os.environ.get("AGENT_RUNNER") == "module"
        else (str(Path(__file__).with_name("stub_runner.py")),),
        reconnect_base_s=0.05,
        reconnect_cap_s=0.3,
        slow_retry_s=1.0,
    )
    asyncio.run(serve(settings))

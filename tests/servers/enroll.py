"""Run as a program, with the server's environment: make the database ready and let nodes join. Prints what they need.

`python enroll.py NODE ...` prints {"token": an API token, "credentials": {node: secret}} as JSON.
"""

from __future__ import annotations

import json
import sys

import django
from django.core.management import call_command


def main(names: list[str]) -> None:
    django.setup()
    call_command("migrate", verbosity=0)
    from django.contrib.auth.models import User

    from recovery.access import create_api_token, create_join_token, join_node

    user = User.objects.create_superuser("operator")
    join = create_join_token(uses=len(names))
    credentials = {name: join_node(token=join, node_name=name) for name in names}
    print(json.dumps({"token": create_api_token(user=user, name="tests"), "credentials": credentials}))


if __name__ == "__main__":
    main(sys.argv[1:])

"""`manage.py export_openapi`: writes the API's OpenAPI document to docs/openapi.json, or checks that it is current."""

from __future__ import annotations

import json
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from dashboard.api.app import openapi_document

PATH = settings.BASE_DIR / "docs" / "openapi.json"


def rendered() -> str:
    """The document as it is committed."""
    return json.dumps(openapi_document(), indent=1, sort_keys=True) + "\n"


class Command(BaseCommand):
    help = "Write the OpenAPI document of the REST API to docs/openapi.json."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--check", action="store_true", help="Only say whether the file is current; exit 1 if not.")

    def handle(self, *args: Any, **options: Any) -> None:
        if not options["check"]:
            PATH.parent.mkdir(exist_ok=True)
            PATH.write_text(rendered())
            self.stdout.write(f"Wrote {PATH}.")
        elif not PATH.exists() or PATH.read_text() != rendered():
            raise CommandError(f"{PATH} is not current: run `manage.py export_openapi` and commit it.")

"""What a person types: `everstep <command>`. Standard library only; each command is a module with `add_parser`."""

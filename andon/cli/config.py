"""`andon config …`: one function per command, which parses and makes one call."""

from __future__ import annotations

import json

import typer

from andon.cli.arguments import ANY_KEY, Arguments, AsJson, Finetune, new_app, run_configuration, terminal

config_app = new_app(name="config", help="Show and check configurations.")


@config_app.command("show", context_settings=ANY_KEY)
def config_show(arguments: Arguments, finetune: Finetune = False, as_json: AsJson = False) -> None:
    """Print the whole configuration with the help of each key. CONFIG.yaml, presets and options are resolved."""
    from andon.config.show import annotated

    config = run_configuration(arguments or (["MODEL", "DATA"] if finetune else []), finetune)
    typer.echo(config.model_dump_json() + "\n" if as_json else annotated(config), nl=False)


@config_app.command("presets")
def config_presets(as_json: AsJson = False) -> None:
    """List the presets. Each is a size of the model and settings that train it well."""
    from andon.config.show import show_presets

    show_presets(terminal(), as_json)


@config_app.command("reference")
def config_reference() -> None:
    """Print every key with its default and help, in Markdown."""
    from andon.config.show import reference

    typer.echo(reference(), nl=False)


@config_app.command("validate", context_settings=ANY_KEY)
def config_validate(arguments: Arguments) -> None:
    """Check a configuration without training and without reading its data."""
    from andon.run.screen.terminal import counted

    config = run_configuration(arguments)
    steps = f"{config.train.steps:,} steps" if config.train.steps else "as many steps as its epochs take"
    workers = counted(config.workers, "worker")
    typer.echo(f"valid: {config.model_name}, {steps}, {workers} (its data is not read)")


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of configurations."""
    from andon.config.schema import Config

    typer.echo(json.dumps(Config.model_json_schema(), indent=2))

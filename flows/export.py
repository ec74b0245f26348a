"""`rollbook export`: a policy version as a checkpoint that transformers and vLLM load."""

from pathlib import Path
from typing import Annotated

import typer

from flows.printing import quiet_engines
from flows.query import LakeOption
from tasks.lake.location import lake_at
from tasks.lake.runs import open_run


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run.")],
    version: Annotated[int, typer.Argument(metavar="VERSION", min=0, help="The policy version; 0 is the initial one.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write; it must be new.")],
    lake: LakeOption = None,
) -> None:
    """Write a policy version as a Hugging Face checkpoint, with its tokenizer and a model card.

    A version whose weights are no longer stored is rebuilt from the stored experience.
    """
    quiet_engines()
    found = open_run(lake_at(lake), run)
    from tasks.export import export as write

    digest = write(found, version, folder)
    typer.echo(f"{folder}: version {version} of {run}, weights {digest[:12]}")

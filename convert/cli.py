"""kiln: checkpoint in, proven artifact out. Commands parse, call and print; they decide nothing else."""

import click

from convert.commands.ask import doctor, probe
from convert.commands.check import inspect, verify
from convert.commands.common import Kiln
from convert.commands.draft import draft
from convert.commands.hub import fetch, publish
from convert.commands.make import convert, demo, plan


@click.group(cls=Kiln, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="kiln", prog_name="kiln")
def main() -> None:
    """Turn a Kimi K2.6 checkpoint into an artifact that a GPU node can serve from at once.

    \b
    kiln probe moonshotai/Kimi-K2.6 --tp 8     will it work here? go or no-go, from headers alone
    kiln plan moonshotai/Kimi-K2.6 --tp 8      what would be written, from headers alone
    kiln convert CHECKPOINT --tp 8 --out DIR   write it, resume it, seal it
    kiln convert DIR --tp 4 --out OTHER        cut it again, without the checkpoint
    kiln draft DIR DRAFT                       add a speculative draft to a finished artifact
    kiln verify DIR --against CHECKPOINT       prove it, bit for bit
    kiln doctor DIR                            will it serve from this machine?
    kiln publish DIR OWNER/NAME                send it to the hub, and prove that it arrived
    kiln fetch OWNER/NAME --rank 0 --out DIR   take back what one rank needs

    Exit codes: 0 done, 1 the input or artifact is wrong, 2 wrong usage. probe and doctor: 1 is no-go.
    """


for command in (demo, probe, plan, convert, draft, verify, inspect, doctor, publish, fetch):
    main.add_command(command)

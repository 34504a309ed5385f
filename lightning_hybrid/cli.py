"""The command ``lightning-hybrid``, which is ``python -m lightning_hybrid`` too."""

from __future__ import annotations

import argparse
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.errors import ConfigError, HybridError
from lightning_hybrid.core.policies import policy_names
from lightning_hybrid.reports.gantt import check_picture
from lightning_hybrid.reports.probed import probed_json, probed_text
from lightning_hybrid.reports.simulated import SimulationResult
from lightning_hybrid.runtime.recording import Recording
from lightning_hybrid.simulation import replay, simulate

Command = Callable[[argparse.Namespace], int]

_SPEEDS = "4x1"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
        0 when it did what it should; 1 when it ran and found something wrong; 2 when it was asked in a wrong way.
    """
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except ConfigError as err:
        return _refuse(options, f"{_option_of(err.field)} must {err.rule}, got {err.value!r}")
    except OSError as err:
        return _refuse(options, f"{err.filename}: {err.strerror}")
    except (HybridError, ImportError, ValueError) as err:
        return _refuse(options, str(err))
    return code


def _refuse(options: argparse.Namespace, why: str) -> int:
    print(f"lightning-hybrid {options.command}: error: {why}", file=sys.stderr)
    return 2


def _option_of(field: str) -> str:
    name, bracket, index = {"path": "gantt"}.get(field, field).partition("[")
    return f"--{name.replace('_', '-')}{bracket}{index}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lightning-hybrid", description="Tools beside the callback.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, add, run in _COMMANDS:
        command = add(commands, name)
        command.set_defaults(run=run)
    return parser


# --- simulate -------------------------------------------------------------------------------------------------------


def _add_simulate(commands: Any, name: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help="run the scheduler in virtual time, on devices of your choice or on a recorded run",
        description="Runs the Trainer's queue, policies and selector in virtual time. A cell of cost 1 takes a device"
        " of speed 1 one second.",
        epilog="example: lightning-hybrid simulate --speeds 6x1,sudden:1:10:0.25,0.5 --costs lognormal:1"
        " --gantt run.svg",
    )
    what = parser.add_argument_group("what is run")
    what.add_argument(
        "--speeds",
        help="devices, separated by commas: SPEED, LOW..HIGH (drawn), drift:SPEED:LAST:SECONDS,"
        " sudden:SPEED:SECONDS:LATER, periodic:SPEED:OTHER:PERIOD, failing:SPEED:SECONDS; 6x before one makes six of"
        f" it (default {_SPEEDS})",
    )
    what.add_argument("--costs", help="costs of cells: equal, uniform:LOW:HIGH or lognormal:SIGMA (default equal)")
    what.add_argument("--num-cells", type=int, metavar="N", help="how many cells are drawn (default 50 per device)")
    what.add_argument(
        "--lengths", type=Path, metavar="FILE", help="lengths or costs of samples, as text or .npy, in place of --costs"
    )
    what.add_argument("--batch-size", type=int, metavar="N", help="samples of --lengths in one cell (default 1)")
    what.add_argument("--seed", type=int, help="of everything that is drawn (default 0)")
    what.add_argument("--replay", type=Path, metavar="FILE", help="in place of all that: a run that was recorded")
    how = parser.add_argument_group("how it is run")
    names = ", ".join(policy_names())
    how.add_argument("--policy", help=f"auto, {names} (default: auto, or that of the recorded run)")
    how.add_argument("--costs-unknown", action="store_true", help="hide the costs from the scheduler")
    how.add_argument("--store-latency-s", type=float, default=2e-4, metavar="S", help="of one request (%(default)s)")
    how.add_argument("--lease-s", type=float, metavar="S", help="after which a failed device's cells are taken over")
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--json", action="store_true", help="one line of JSON in place of the report")
    shown.add_argument(
        "--gantt", metavar="FILE", help="draw the run into a .png, .svg or .pdf file; - prints it as text"
    )
    return parser


def _simulate(options: argparse.Namespace) -> int:
    if options.gantt not in (None, "-"):
        check_picture(options.gantt)  # before anything runs
    result = _simulated(options) if options.replay is None else _replayed(options)
    print(result.to_json() if options.json else result.format())
    if options.gantt == "-":
        print(f"\n{result.gantt_text()}", file=sys.stderr if options.json else sys.stdout)
    elif options.gantt is not None:
        result.save_gantt(options.gantt)
    return 0 if result.exactly_once else 1


def _simulated(options: argparse.Namespace) -> SimulationResult:
    if options.lengths is not None and options.costs is not None:
        raise ConfigError("costs", options.costs, "be left out with --lengths")
    costs = options.costs or "equal" if options.lengths is None else options.lengths
    return simulate(
        _SPEEDS if options.speeds is None else options.speeds,
        costs=costs,
        num_cells=options.num_cells,
        batch_size=1 if options.batch_size is None else options.batch_size,
        costs_known=not options.costs_unknown,
        policy=options.policy,
        store_latency_s=options.store_latency_s,
        seed=options.seed or 0,
        config=HybridConfig(lease_s=options.lease_s),
    )


def _replayed(options: argparse.Namespace) -> SimulationResult:
    for name in ("speeds", "costs", "num_cells", "lengths", "batch_size", "seed", "lease_s"):
        if getattr(options, name) is not None:
            raise ConfigError(name, getattr(options, name), "be left out with --replay, which tells it")
    if options.costs_unknown:
        raise ConfigError("costs_unknown", True, "be left out with --replay, which tells it")
    return replay(Recording.load(options.replay), policy=options.policy, store_latency_s=options.store_latency_s)


# --- probe ----------------------------------------------------------------------------------------------------------


_BETWEEN_S = 0.5
"""From the first reading, which has no rates, to the second."""
_ANSWER_S = 10.0


def _add_probe(commands: Any, name: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help="show the state of this machine's devices, and what is not known of them and why",
        description="Reads the host and every accelerator from its driver. Nothing is started on a device.",
        epilog="example: lightning-hybrid probe --watch 2",
    )
    parser.add_argument("--json", action="store_true", help="everything that is known, as one line of JSON")
    parser.add_argument("--watch", type=float, metavar="SECONDS", help="again and again, until interrupted")
    return parser


def _probe(options: argparse.Namespace) -> int:
    if options.watch is not None and not 0 < options.watch < math.inf:
        raise ConfigError("watch", options.watch, "be a positive number of seconds")
    from lightning_hybrid.probes.machine import Machine  # torch is needed to ask for devices, and by no other command

    logging.getLogger("lightning_hybrid").addHandler(logging.NullHandler())  # the table says it all
    machine = Machine(period_s=options.watch or _BETWEEN_S)
    show = probed_json if options.json else probed_text
    machine.start()
    try:
        machine.wait(2, _BETWEEN_S + _ANSWER_S if options.watch is None else _ANSWER_S)
        print(show(*machine.read(), machine.missing), flush=True)
        while options.watch is not None:
            time.sleep(options.watch)
            print(("" if options.json else "\n") + show(*machine.read(), machine.missing), flush=True)
    except KeyboardInterrupt:
        return 0
    finally:
        machine.stop()
    return 0


_COMMANDS: tuple[tuple[str, Callable[[Any, str], argparse.ArgumentParser], Command], ...] = (
    ("probe", _add_probe, _probe),
    ("simulate", _add_simulate, _simulate),
)
"""Name, what adds its parser, what runs it."""

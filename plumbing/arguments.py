"""
plumbing/arguments.py (tests/test_launch.py): the command line of every script: flags, and settings
that few runs change.

  --flag VALUE          as argparse reads it, but never abbreviated
  --set NAME=VALUE ..   settings: --help lists them below the flags; they too are saved in args.json

Reads sys.argv; writes nothing.
"""
import argparse
import copy
import difflib
import json
import os
import sys

import launch


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help with defaults, and the description as it was written."""

    def _get_help_string(self, action):
        return super()._get_help_string(action) if action.default is not None else action.help


class Parser(argparse.ArgumentParser):
    """Flags and settings. An error is one line, without the whole usage."""

    settings = None  # the parser of --set

    def add_setting(self, name, help, default=None, **options):
        """A setting, given by --set: of the type of its default, if `options`, which are those of
        add_argument, do not say another one."""
        if not self.settings:
            self.settings = Parser(prog=f"{self.prog}: --set", add_help=False, allow_abbrev=False)
            self.add_argument("--set", nargs="+", action=Set, default=argparse.SUPPRESS,
                              metavar="NAME=VALUE", help="settings that few runs change, see below")
        kind = {"type": type(default)}
        if isinstance(default, bool):
            kind = {"type": {"true": True, "false": False}.get, "choices": [True, False]}
        self.settings.add_argument(f"--{name}", help=help, default=argparse.SUPPRESS,
                                   **{**kind, **options})
        self.set_defaults(**{name: default})

    def format_help(self):
        if not self.settings:
            return super().format_help()
        lines = [f"  {s.dest}={self.get_default(s.dest)}  {s.help} {s.choices or ''}".rstrip()
                 for s in self.settings._actions]
        return "\n".join([super().format_help() + "\nsettings of --set:", *lines, ""])

    def error(self, message):
        flag = message.partition("unrecognized arguments: ")[2].split("=")[0].split(" ")[0]
        settings = self.settings._actions if self.settings else []
        by_flag = {f"--{s.dest.replace('_', '-')}": f"--set {s.dest}=" for s in settings}
        near = by_flag.get(flag) or "".join(
            difflib.get_close_matches(flag, self._option_string_actions, 1, 0.7))
        if self.prog.endswith("--set"):  # a setting has no dashes
            message = message.replace("unrecognized arguments: --", "no such setting: ")
            message, near = message.replace("argument --", ""), ""
        self.exit(2, f"{self.prog}: error: {message}{'; nearest: ' * bool(near)}{near}\n")


class Set(argparse.Action):
    """--set NAME=VALUE ..: the attribute NAME of the parsed flags."""

    def __call__(self, parser, namespace, texts, option_string=None):
        parser.settings.parse_args([f"--{text}" for text in texts], namespace)


def parser(description):
    """A script's ArgumentParser. A flag is spelled out: an abbreviation could mean another one in
    the next version."""
    return Parser(description=description, formatter_class=HelpFormatter, allow_abbrev=False)


def parse_early(parser):
    """The flags so far, for presets: they change defaults, which --help then shows."""
    early = copy.deepcopy(parser)
    for action in early._actions:
        action.required = False  # a missing flag is told of later, and --help needs none
    return early.parse_known_args([a for a in sys.argv[1:] if a not in ("-h", "--help")])[0]


def require_min(minimum, args, *names):
    """Raises UserError naming the first of these settings below `minimum` or infinite."""
    for name in names:
        if not minimum <= (value := getattr(args, name)) < float("inf"):  # NaN fails this, too
            raise launch.UserError(f"{name} must be at least {minimum}, got {value}")


def add_computing(parser):
    """Settings of every stage that computes with a checkpoint."""
    add = parser.add_setting
    add("cpu", "compute without a GPU, although there should be one", False)
    add("patience", "seconds a phase may take before the run ends and prints its stacks; 0 = for "
        "ever", 1800.0)
    add("chat_template_kwargs", 'JSON, for the template of all agents: {"enable_thinking": false}',
        {}, type=json.loads)


def check_outputs(outputs, inputs):
    """Raises UserError if a file that will be written is one that is read, also through a link."""
    read = {os.path.realpath(path) for path in inputs if path}
    for path in outputs:
        if os.path.realpath(path) in read:
            raise launch.UserError(f"{path} would be replaced, but it is an input; change --out")


def report_check(faults, of):
    """Ends --check: prints each fault; raises UserError if there is one. of: what was checked."""
    for fault in faults:
        print(launch.printable(fault))
    if faults:
        raise launch.UserError(f"--check: {len(faults)} faults in {of} (no file? --video-root)")
    print(f"no fault in {of}")

"""The reference as Markdown: commands from the help of `outbox`, names from the docstrings of the package."""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from functools import cached_property
from inspect import formatannotation
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from uuid import UUID

import click

import outbox
import outbox.rocketmq
from outbox.admin.results import (
    Decided,
    Finding,
    HeldKey,
    KeyDetail,
    ParkedCount,
    Passage,
    Proposal,
    SubscriptionDetails,
)
from outbox.cli import main
from outbox.model.decision import Decision
from outbox.model.pausing import Pause
from outbox.model.status import (
    History,
    HistoryStep,
    LogStatus,
    PartitionStatus,
    Status,
    StoredProperties,
    TransactionsStatus,
    TroubleStatus,
    WorkerStatus,
)
from outbox.store.subscriptions.parked_messages import ParkedMessage

_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$")
_ENTRY = re.compile(r"^    (\*{0,2}\w[\w, .*]*): (.*)$")
_MEMBERS = (property, cached_property, classmethod, staticmethod)
#: The frozen results that several commands print with `--json`, in the order of the page.
RESULTS = (
    Finding, Proposal, StoredProperties, Status, PartitionStatus, TroubleStatus, Pause, SubscriptionDetails,
    ParkedMessage, ParkedCount, WorkerStatus, History, HistoryStep, HeldKey, KeyDetail, Passage, Decided, Decision,
    TransactionsStatus, LogStatus,
)  # fmt: skip
#: What JSON makes of a type.
_JSON = {str: "text", UUID: "text", datetime: "text", bool: "boolean", int: "number", float: "number"}


@dataclass(frozen=True, slots=True)
class _Text:
    """Text that a signature shows as it is."""

    text: str

    def __repr__(self) -> str:
        return self.text


def commands() -> str:
    """Return a section for each command: purpose, usage, options with defaults and variables."""
    context = click.Context(main, info_name="outbox", auto_envvar_prefix="OUTBOX")
    return "\n".join(line for section in _sections_below(main, context) for line in section)


def _sections_below(group: click.Group, context: click.Context) -> Iterator[list[str]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        inner = click.Context(command, info_name=name, parent=context)
        yield _section(command, inner)
        if isinstance(command, click.Group):
            yield from _sections_below(command, inner)


def _section(command: click.Command, context: click.Context) -> list[str]:
    name = context.command_path
    lines = [f"## {name}", "", inspect.cleandoc(command.help or "").replace("\b\n", ""), ""]
    if not isinstance(command, click.Group):
        lines += ["```text", " ".join([name, *command.collect_usage_pieces(context)]), "```", ""]
    for purpose, example in getattr(command, "examples", {}).items():
        lines += [purpose, "", "```sh", example, "```", ""]
    options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
    if options:
        lines += ["| option | what | by default | variable |", "|---|---|---|---|"]
        lines += [_row(option, context) for option in options]
    return [*lines, ""]


def _row(option: click.Option, context: click.Context) -> str:
    record = option.get_help_record(context)
    assert record is not None
    extra = option.get_help_extra(context)
    default = extra.get("default", "")
    variables = ", ".join(f"`{each}`" for each in extra.get("envvars", ()))
    cells = [f"`{record[0]}`", option.help or "", f"`{default}`" if default else "", variables]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |"


def names() -> str:
    """Return a section for each public name: signature, docstring, methods; and the types that have a name."""
    public = [(name, getattr(outbox, name)) for name in outbox.__all__]
    functions = [line for name, each in public if inspect.isfunction(each) for line in _function(name, each, "##")]
    classes = [line for name, each in public if inspect.isclass(each) for line in _class(name, each)]
    types = [line for name, each in public if get_args(each) for line in _type(name, each)]
    return "\n".join([*classes, *functions, *types])


def _type(name: str, each: object) -> list[str]:
    """Return a union, one of its types a line."""
    text = re.sub(r"\b(?:\w+\.)+(?=\w)", "", "\n    | ".join(map(formatannotation, get_args(each))))
    return [f"## {name}", "", "```text", f"{name} =\n    {text}", "```", ""]


def _class(name: str, each: type) -> list[str]:
    lines = [f"## {name}", ""]
    if not issubclass(each, Exception) and not getattr(each, "_is_protocol", False):
        lines += _signature(name, each)
    lines += [*_documentation(each), ""]
    for method, value in _members(each):
        if isinstance(value, property | cached_property):
            lines += [f"### {name}.{method}", "", *_documentation(value), ""]
        else:
            lines += _function(f"{name}.{method}", getattr(each, method), "###")
    return lines


def _members(each: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of a class and of its bases within the package."""
    seen: set[str] = set()
    for base in each.__mro__:
        if base.__module__.startswith("outbox."):
            for name, value in vars(base).items():
                member = isinstance(value, _MEMBERS) or inspect.isfunction(value)
                if member and not name.startswith("_") and name not in seen and getattr(each, name).__doc__:
                    seen.add(name)
                    yield name, value


def _function(name: str, function: Any, level: str) -> list[str]:
    return [f"{level} {name}", "", *_signature(name, function), *_documentation(function), ""]


def _signature(name: str, function: Any) -> list[str]:
    """Return the call, with a parameter a line where one line would be long."""
    signature = inspect.signature(function)
    parameters: list[str] = []
    for each in signature.parameters.values():
        if each.kind is each.KEYWORD_ONLY and not any(other.startswith("*") for other in parameters):
            parameters.append("*")
        if each.name != "self":
            parameters.append(str(each.replace(annotation=_plain(each.annotation), default=_default(each.default))))
    result = signature.return_annotation
    end = ")" if result is signature.empty else f") -> {_plain(result)}"
    call = f"{name}({', '.join(parameters)}{end}"
    if len(call) > 100:
        call = f"{name}(\n    " + ",\n    ".join(parameters) + f"\n{end}"
    return ["```text", call, "```", ""]


def _plain(annotation: Any) -> Any:
    return _Text(annotation) if isinstance(annotation, str) else annotation


def _default(value: Any) -> Any:
    """Return a default as a reader would write it; `…` for an object that no text makes."""
    if is_dataclass(value) and value == type(value)():  # type: ignore[misc, operator]
        return _Text(f"{type(value).__name__}()")
    text = f'"{value}"' if isinstance(value, str) else repr(value).replace("datetime.timedelta", "timedelta")
    return value if value is inspect.Parameter.empty else _Text("…" if text.startswith("<") else text)


def results() -> str:
    """Return a section for each frozen result: what the result is, and its fields, of which JSON has the names."""
    return "\n".join(line for each in RESULTS for line in _result(each))


def _result(each: type) -> Iterator[str]:
    base = next((other for other in each.__mro__[1:] if other in RESULTS), None)
    inherited = set() if base is None else {field.name for field in fields(base)}
    types, said = get_type_hints(each), meanings(each)
    yield from (f"### {each.__name__}", "", (inspect.getdoc(each) or "").partition("\n\nAttributes:")[0], "")
    if base is not None:
        yield from (f"Each has the fields of {_link(base)}, too.", "")
    yield from ("| field | type | meaning |", "|---|---|---|")
    for name in (field.name for field in fields(each) if field.name not in inherited):
        yield f"| `{name}` | {_json_type(types[name])} | {said.get(name, '')} |"
    yield ""


def meanings(each: type) -> Mapping[str, str]:
    """Return what the docstrings of a class and its bases say of its attributes."""
    found: dict[str, str] = {}
    for base in reversed(each.__mro__):
        attributes = (inspect.cleandoc(base.__doc__) if base.__doc__ else "").partition("\nAttributes:\n")[2]
        for entry in re.split(r"\n    (?=\w+: )", f"\n{attributes}")[1:]:
            name, _, meaning = " ".join(entry.replace("|", r"\|").split()).partition(": ")
            # JSON has null for None; a cell of one sentence has no full stop.
            found[name] = re.sub(r"\bNone\b", "null", meaning if ". " in meaning else meaning.removesuffix("."))
    return found


def _link(each: type) -> str:
    return f"[{each.__name__}](#{each.__name__.lower()})"


def _json_type(annotation: Any) -> str:
    """Return in words what JSON has for a type."""
    if annotation in RESULTS:
        return _link(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join([*(_json_type(each) for each in arguments if each is not NoneType), "null"])
    if origin is tuple:
        return f"list of {_link(arguments[0])}" if arguments[0] in RESULTS else "list"
    if origin is Mapping:
        return "object"
    return "text" if origin is Literal else _JSON[annotation]


def _documentation(value: object) -> Iterator[str]:
    """Yield the lines of a docstring; entries of Args, Raises and the like become list items."""
    in_section = False
    for line in (inspect.getdoc(value) or "").splitlines():
        if found := _SECTION.match(line):
            in_section = True
            yield from (f"**{found[1]}**", "")
        elif in_section and (entry := _ENTRY.match(line)):
            yield f"- `{entry[1]}`: {entry[2]}"
        elif in_section and line.startswith("    "):
            yield f"  {line.strip()}"
        else:
            in_section = in_section and not line
            yield line

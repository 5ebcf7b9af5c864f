"""Files of cases: JSON or YAML, and beside it the tensors that their masks hold."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onchip import spec
from onchip.bench.cases import Case, copied, mask_text
from onchip.mask import Mask

FIELDS = {field.name for field in fields(Case)}


def save(cases: list[Case], path: Path) -> None:
    """Write the cases as JSON that `load` reads, and tensors of their masks to `tensors_of(path)`.

    Raises ValueError, before anything is written, for a mask of a function: only the process that made it has that.
    """
    tensors: list[Tensor] = []
    bodies = []
    for case in cases:
        try:
            mask = _written(case.mask, tensors)
        except ValueError as error:
            raise ValueError(f"{case.label}: {error}") from None
        bodies.append({**replace(case, mask="").to_json(), "mask": mask})
    if tensors:
        torch.save(tensors, tensors_of(path))
    path.write_text(json.dumps(bodies, indent=1) + "\n", encoding="utf-8")


def tensors_of(path: Path) -> Path:
    """The file of tensors beside a file of cases: a list, as torch.save writes it."""
    return path.with_name(f"{path.name}.pt")


def load(path: Path) -> list[Case]:
    """The cases of a .json, .yaml or .yml file: a list of dicts of `Case`'s fields, or {name: dict}.

    Raises ValueError for what is wrong in it, naming the case, or the name that is given twice; OSError where the file
    cannot be read.
    """
    found = _parsed(path)
    if isinstance(found, dict):
        bodies = ((name, {} if body is None else body) for name, body in found.items())
        found = [{"name": str(n), **body} if isinstance(body, dict) else body for n, body in bodies]
    if not isinstance(found, list) or not found or not all(isinstance(body, dict) for body in found):
        raise ValueError(f"{path}: expected a list of cases, or names with one each")
    masks = [body.get("mask") for body in found]
    held = any(isinstance(mask, dict) and mask.get("tensors") for mask in masks)
    tensors = _tensors(tensors_of(path)) if held else []
    return [_case(path, i, body, tensors) for i, body in enumerate(found)]


def _written(mask: str | Mask, tensors: list[Tensor]) -> str | dict[str, Any]:
    """Its expression, or its words and integers as `spec.write` has them and the places of its tensors in the list."""
    try:
        return mask_text(mask)
    except ValueError:
        assert isinstance(mask, Mask)
    text, ints, own = spec.write(mask, None)
    if "where" in text.split():
        raise ValueError(
            f"mask: {mask!r} holds a function, which a file of cases cannot; measure it in its own process"
        )
    first = len(tensors)
    tensors += [copied(tensor) for tensor in own]
    return {"text": text, "ints": ints, "tensors": list(range(first, len(tensors)))}


def _read(body: dict[str, Any], tensors: list[Tensor]) -> Mask:
    """The mask that `_written` wrote."""
    wrong = ValueError(
        "mask: expected an expression, or text, ints and tensors as onchip.record() saves them"
    )
    if set(body) != {"text", "ints", "tensors"} or not isinstance(body["text"], str):
        raise wrong
    if not all(
        isinstance(body[name], list) and all(type(n) is int for n in body[name])
        for name in ("ints", "tensors")
    ):
        raise wrong
    if not all(0 <= n < len(tensors) for n in body["tensors"]):
        raise ValueError(
            f"mask: names tensors {body['tensors']}, expected some of the {len(tensors)} that are there"
        )
    if {"where", "mod"} & set(body["text"].split()):
        raise wrong  # functions are of the process that wrote it
    own = [tensors[n] for n in body["tensors"]]
    try:
        mask = spec.read(body["text"], body["ints"], own)[0]
        again = None if mask is None else spec.write(mask, None)
    except (LookupError, StopIteration, TypeError, ValueError, RuntimeError):
        raise wrong from None
    if (
        mask is None
        or again is None
        or again[:2] != (body["text"], body["ints"])
        or len(again[2]) != len(own)
    ):
        raise wrong
    return mask


def _parsed(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from None
    if path.suffix not in (".yaml", ".yml"):
        try:
            return json.loads(text, object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from None
    try:
        import yaml
    except ImportError:
        raise ValueError(f"{path}: reading YAML needs the package pyyaml") from None

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(
            self, anchor: Any
        ) -> Any:  # here, since later << has brought in other mappings' keys
            node = super().compose_mapping_node(anchor)
            _once([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
            return node

    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of them; ValueError where a name comes twice, of which JSON and YAML would keep the last."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is given twice, expected each name once")
        found[name] = value
    return found


def _tensors(path: Path) -> list[Tensor]:
    if not path.exists():
        raise ValueError(
            f"{path}: is not there, expected the masks' tensors, which onchip.record() saves beside the cases"
        )
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch makes of a file that is not its own
        raise ValueError(f"{path}: cannot be read as the masks' tensors ({type(error).__name__})") from None
    if not isinstance(found, list) or not all(map(_is_held, found)):
        raise ValueError(f"{path}: expected a list of bool and integer tensors")
    return found


def _is_held(x: object) -> bool:
    return isinstance(x, Tensor) and not x.is_floating_point() and not x.is_complex()


def _case(path: Path, number: int, body: dict[Any, Any], tensors: list[Tensor]) -> Case:
    name = f"case {number}" + (f" ({body['name']})" if isinstance(body.get("name"), str) else "")
    unknown = sorted(str(key) for key in body if key not in FIELDS)
    if unknown:
        raise ValueError(f"{path}: {name} has {', '.join(unknown)}, expected of {', '.join(sorted(FIELDS))}")
    try:
        if isinstance(body.get("mask"), dict):
            body = {**body, "mask": _read(body["mask"], tensors)}
        case = Case(**body)
        case.check()
    except (TypeError, ValueError, RuntimeError, MemoryError, OverflowError) as error:
        raise ValueError(f"{path}: {name}: {error}") from None
    return case
